"""Files of a Hugging Face folder: layouts, shards, tokenizers, and everything that can be wrong."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.models import tensor_file
from slipstream.models.folder import load_model_folder, new_folder
from slipstream.models.hf import export_folder, import_folder
from tests.models.hf_models import EAGER, build, save, tokens


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    save("llama", tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "olmoe"])
def test_stacked_experts_are_read_like_single_ones(case: str, tmp_path: Path) -> None:
    theirs = save(case, tmp_path / "hf")
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    (tmp_path / "stacked").mkdir()
    save_file(state, tmp_path / "stacked" / "model.safetensors")
    config = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "stacked" / "config.json").write_text(config)
    for name in ("hf", "stacked"):
        import_folder(tmp_path / name, tmp_path / f"ours-{name}")
    first, second = (
        load_file(tmp_path / f"ours-{name}" / "model.safetensors") for name in ("hf", "stacked")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    theirs = save("mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    ours = load_model_folder(tmp_path / "ours")
    export_folder(ours, tmp_path / "out", max_shard_bytes=12_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(shard).values()) for shard in shards]
    assert max(sizes) <= 12_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, **EAGER
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, theirs(tokens()).logits)
    import_folder(tmp_path / "out", tmp_path / "again")
    again = load_model_folder(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in ours.state_dict().items())


def test_a_tensor_larger_than_a_shard_gets_its_own(hf: Path, tmp_path: Path) -> None:
    import_folder(hf, tmp_path / "ours")
    export_folder(load_model_folder(tmp_path / "ours"), tmp_path / "out", max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(
        load_file(hf / "model.safetensors")
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"


def test_old_buffers_are_ignored_and_mixed_dtypes_are_widened(hf: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        tensors[name] = tensors[name].bfloat16()

    rewrite(hf, change)
    import_folder(hf, tmp_path / "ours")
    wqkv = load_model_folder(tmp_path / "ours").layers[0].attention.wqkv.weight
    assert wqkv.dtype == torch.float32
    assert torch.equal(wqkv[24:32], load_file(hf / "model.safetensors")[name].float())


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_embeddings_under_either_name(kept: str, tmp_path: Path) -> None:
    theirs = save("llama-biases-tied-gelu", tmp_path / "hf")
    table = theirs.get_input_embeddings().weight.detach()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        tensors.pop("model.embed_tokens.weight", None)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if kept in (name, "both"):
                tensors[name] = table.clone()

    rewrite(tmp_path / "hf", change)
    import_folder(tmp_path / "hf", tmp_path / "ours")
    assert torch.equal(load_model_folder(tmp_path / "ours").embed.weight, table)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    theirs = save("llama-biases-tied-gelu", tmp_path / "hf")
    other = theirs.get_input_embeddings().weight.detach() + 1
    rewrite(tmp_path / "hf", lambda tensors: tensors.update({"lm_head.weight": other}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        import_folder(tmp_path / "hf", tmp_path / "ours")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def _set(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: value}))


def _index(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "bad json": (lambda f: (f / "config.json").write_text("{,"), "config.json: not readable JSON"),
    "json list": (lambda f: (f / "config.json").write_text("[]"), "config.json: not a JSON object"),
    "type": (lambda f: configure(f, model_type="gpt2"), "'gpt2' is not one of llama, qwen3, mix"),
    "no type": (lambda f: configure(f, model_type=None), "model_type = None"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "truncated": (_truncate, "model.safetensors: damaged or cut short"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged or cut short"),
    "missing": (_drop("model.norm.weight"), "tensor model.norm.weight is missing"),
    "extra": (_set("model.extra.weight", torch.ones(2)), "model.extra.weight is not part"),
    "shape": (_set("model.norm.weight", torch.ones(23)), "norm.weight is [23], expected [24]"),
    "dtype": (
        _set("model.norm.weight", torch.ones(24, dtype=torch.int8)),
        "model.norm.weight is I8, expected one of F64",
    ),
    "config of a larger model": (
        lambda f: configure(f, num_hidden_layers=4),
        "tensor model.layers.3.input_layernorm.weight is missing",
    ),
    "config of a smaller model": (
        lambda f: configure(f, num_hidden_layers=2),
        "model.layers.2.input_layernorm.weight is not part of the model",
    ),
    "index without map": (_index("{}"), "index.json: no weight_map"),
    "missing shard": (
        _index('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
        "model-00002-of-00002.safetensors: missing shard",
    ),
    "index names another": (
        _index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "no tensor a, the index has it",
    ),
    "index leaves the folder": (_index('{"weight_map": {"a": "../x"}}'), "expected a file name"),
    "bad tokenizer config": (
        lambda f: [(f / n).write_text("{") for n in ("tokenizer.json", "tokenizer_config.json")],
        "tokenizer_config.json: not readable JSON",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_error_that_names_it(damage: str, hf: Path, tmp_path: Path) -> None:
    act, named = DAMAGES[damage]
    act(hf)
    with pytest.raises(SlipstreamError) as caught:
        import_folder(hf, tmp_path / "ours")
    assert named in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save("olmoe", tmp_path / "hf")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    _drop(name)(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=name):
        import_folder(tmp_path / "hf", tmp_path / "ours")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        import_folder(tmp_path / "nowhere", tmp_path / "ours")


def test_an_existing_target_is_kept_unless_asked(hf: Path, tmp_path: Path) -> None:
    target = tmp_path / "ours"
    target.mkdir()
    import_folder(hf, target)
    with pytest.raises(CheckpointError, match="--overwrite"):
        import_folder(hf, target)
    model = load_model_folder(target)
    save("qwen3", tmp_path / "other")
    import_folder(tmp_path / "other", target, overwrite=True)
    assert load_model_folder(target).config.qk_norm == "head"
    assert model.config.qk_norm == "none"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "other", "ours"]


@pytest.mark.parametrize("content", ["notes.txt", "config.toml and a folder"])
def test_overwrite_never_deletes_what_is_no_model(content: str, hf: Path, tmp_path: Path) -> None:
    target = tmp_path / "ours"
    target.mkdir()
    if content == "notes.txt":
        (target / content).write_text("mine")
    else:
        (target / "config.toml").write_text("")
        (target / "checkpoints").mkdir()
    before = sorted(target.rglob("*"))
    with pytest.raises(CheckpointError, match="is no model folder"):
        import_folder(hf, target, overwrite=True)
    assert sorted(target.rglob("*")) == before
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="is not a folder"):
        import_folder(hf, file, overwrite=True)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_full_disk_leaves_nothing_behind(
    direction: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_folder(hf, tmp_path / "ours")
    model = load_model_folder(tmp_path / "ours")
    before = sorted(entry.name for entry in tmp_path.iterdir())

    def convert() -> object:
        if direction == "import":
            return import_folder(hf, tmp_path / "ours", overwrite=True)
        return export_folder(model, tmp_path / "out")

    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "_header", full)
    with pytest.raises(OSError, match="No space left"):
        convert()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert load_model_folder(tmp_path / "ours").config == model.config


def test_new_folder_survives_a_leftover_of_itself(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with new_folder(tmp_path / "a" / "b", overwrite=True) as partial:
            (partial / "config.toml").write_text(text)
    assert (tmp_path / "a" / "b" / "config.toml").read_text() == "two"
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["b"]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, "hello": 4, "world": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template="{{ messages[0]['content'] }}",
    )


def test_the_tokenizer_travels(hf: Path, tmp_path: Path) -> None:
    before = _tokenizer()
    before.save_pretrained(hf)
    import_folder(hf, tmp_path / "ours")
    text = (tmp_path / "ours" / "tokenizer.json").read_text()
    assert text == (hf / "tokenizer.json").read_text()
    config = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    model = load_model_folder(tmp_path / "ours")
    export_folder(model, tmp_path / "out", text, tokenizer_config=config)
    after = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert after("hello world")["input_ids"] == before("hello world")["input_ids"] == [4, 5]
    assert (after.bos_token, after.eos_token, after.pad_token) == ("<s>", "</s>", "<pad>")
    assert after.chat_template == before.chat_template
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id)
    assert ids == (0, 1, 2)
    assert loaded.generation_config.eos_token_id == 1


def test_a_tokenizer_without_its_config_travels(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    text = _tokenizer().backend_tokenizer.to_str()
    export_folder(load_model_folder(tmp_path / "ours"), tmp_path / "out", text)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("world")["input_ids"] == [5]


def test_without_a_tokenizer_no_token_is_special(hf: Path, tmp_path: Path) -> None:
    import_folder(hf, tmp_path / "ours")
    export_folder(load_model_folder(tmp_path / "ours"), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id)
    assert ids == (None, None, None)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_broken_tokenizer_and_an_unknown_family_are_refused(hf: Path, tmp_path: Path) -> None:
    import_folder(hf, tmp_path / "ours")
    model = load_model_folder(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        export_folder(model, tmp_path / "out", "{}")
    with pytest.raises(ConfigError, match="family = 'gpt2' is not one of llama"):
        export_folder(model, tmp_path / "out", family="gpt2")
    assert not (tmp_path / "out").exists()


def test_the_models_of_these_tests_differ_by_seed() -> None:
    first, second = (build("llama", seed).lm_head.weight for seed in (0, 1))
    assert not torch.equal(first, second)
