"""``slipstream import`` and ``slipstream export`` as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from slipstream.cli.export_model import app as export_app
from slipstream.cli.export_model import tokenizer_config
from slipstream.cli.import_model import app as import_app
from slipstream.data.tokenizer_file import byte_tokenizer_json
from slipstream.models import ModelConfig, Transformer
from slipstream.models.folder import save_model_folder
from tests.models.hf_models import EAGER, save, tokens

BYTES = ModelConfig(vocab_size=257, num_layers=1, d_model=16, num_heads=2, d_ff=24)


def run(app: object, *words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_import_then_export(tmp_path: Path) -> None:
    theirs = save("olmoe", tmp_path / "hf")
    said = run(import_app, tmp_path / "hf", "--to", tmp_path / "ours")
    parameters = sum(p.numel() for p in theirs.parameters())
    assert f"{parameters:,} parameters, without tokenizer.json" in said
    said = run(export_app, tmp_path / "ours", "--to", tmp_path / "out", "--dtype", "fp32")
    assert "olmoe" in said
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **EAGER)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, theirs(tokens()).logits)


def test_export_writes_bf16_and_the_end_token_of_the_vocabulary(tmp_path: Path) -> None:
    text = json.dumps(byte_tokenizer_json())
    save_model_folder(Transformer(BYTES), BYTES, tmp_path / "ours", text)
    run(export_app, tmp_path / "ours", "--to", tmp_path / "out", "--family", "llama")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == 256
    assert tokenizer("hi")["input_ids"] == [104, 105]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.eos_token_id == 256
    out = loaded.generate(torch.tensor([[104]]), max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= 4


def test_a_tokenizer_config_beside_the_model_wins(tmp_path: Path) -> None:
    text = json.dumps(byte_tokenizer_json())
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert tokenizer_config(tmp_path, text) == {"eos_token": "a"}
    assert tokenizer_config(tmp_path, None) is None
    other = tokenizer_config(tmp_path / "none", text)
    assert other is not None
    assert other["eos_token"] == "<|endoftext|>"


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = ["import", str(tmp_path / "nowhere"), "--to", str(tmp_path / "ours")]
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere: no such folder" in done.stderr


def test_conversion_does_not_import_transformers(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "hf")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from slipstream.models.folder import load_model_folder\n"
        "from slipstream.models.hf import export_folder, import_folder\n"
        f"root = Path({str(tmp_path)!r})\n"
        "import_folder(root / 'hf', root / 'ours')\n"
        "export_folder(load_model_folder(root / 'ours'), root / 'out')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("verb", ["import", "export"])
def test_help(verb: str) -> None:
    said = run(import_app if verb == "import" else export_app, "--help")
    assert "--overwrite" in said
