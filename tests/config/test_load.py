"""Recipes, overrides, and errors that name the key."""

import tomllib
from pathlib import Path

import pytest

from slipstream.config import difference, load, overlay, parse_overrides, to_toml
from slipstream.errors import ConfigError
from slipstream.train.config import RunConfig, load_run_config

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_values_come_from_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "[optim]\nlr = 0.1\nclip = 2.0\n")
    config = load(
        RunConfig,
        path,
        ["optim.clip=3", "model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.d_ff=8"],
    )
    assert (config.optim.lr, config.optim.clip, config.optim.beta1) == (0.1, 3.0, 0.9)
    assert config.model.moe is not None
    assert config.model.moe.num_experts == 4


def test_overrides_are_toml_values_or_plain_text() -> None:
    assert parse_overrides(["a.b=1e-3", "a.c=true", "d=[1, 2]", "e=some/path", "a.b=2"]) == {
        "a": {"b": 2, "c": True},
        "d": [1, 2],
        "e": "some/path",
    }


@pytest.mark.parametrize("bad", ["optim.lr", "=3", "optim..lr=3", ".lr=3"])
def test_a_malformed_override_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        parse_overrides([bad])


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("train.stpes=3", "train.steps"),
        ("optim.learning_rate=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("num_layers=1", "model.num_layers"),
        ("model.moe.topk=1", "model.moe.top_k"),
        ("trian.seed=1", "train.seed"),
        ("parallel.data.engin=ddp", "parallel.data.engine"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(given: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [given])
    message = str(caught.value)
    assert f"unknown key {given.split('=')[0]}" in message
    if given != "optim.learning_rate=1":
        assert f"did you mean {near}?" in message


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nstep = 3\n")
    with pytest.raises(ConfigError, match=r"recipe\.toml: unknown key train\.step; did you mean"):
        load(RunConfig, path)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.steps=many", r"train\.steps = 'many': must be a whole number \(an integer\)"),
        ("train.steps=0", r"train\.steps = 0: .*greater than 0"),
        ("optim.lr=-1", r"optim\.lr = -1: .*greater than 0"),
        ("train.dtype=fp8", r"train\.dtype = 'fp8': .*'auto', 'bf16' or 'fp32'"),
        ("parallel.data.engine=zero", r"parallel\.data\.engine = 'zero'"),
        ("recompute.budget_gib=40", r"recompute\.budget_gib = 40 needs recompute\.mode = 'auto'"),
        ("recompute.mode=auto", r"recompute\.mode = 'auto' needs recompute\.budget_gib"),
        ("model.num_heads=3", r"d_model = 256 is not divisible by num_heads = 3"),
        ("model.num_kv_heads=3", r"num_heads = 4 is not divisible by num_kv_heads = 3"),
        ("model=3", r"model = 3"),
        ("train.tokens_per_step=1000", r"1000 is not a multiple of data\.seq_len = 1024"),
        ("data.seq_len=4096", r"data\.seq_len = 4096 exceeds model\.max_seq_len = 2048"),
        ("model.preset=qwen3-0.6", r"qwen3-0\.6b"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(override: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load(RunConfig, None, [override])


def test_more_experts_per_token_than_there_are() -> None:
    moe = ["model.moe.num_experts=4", "model.moe.top_k=5", "model.moe.d_ff=8"]
    with pytest.raises(ConfigError, match=r"top_k = 5 exceeds num_experts = 4"):
        load(RunConfig, None, moe)
    with pytest.raises(ConfigError, match=r"model\.moe\.top_k is required"):
        load(RunConfig, None, ["model.moe.num_experts=4", "model.moe.d_ff=8"])


@pytest.mark.parametrize(
    ("text", "part"),
    [("[train\n", "not valid TOML"), ("\xff", "unknown key|not valid TOML")],
)
def test_a_broken_file_is_named(text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"recipe\.toml: .*({part})"):
        load(RunConfig, write(tmp_path, text))


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such recipe"):
        load(RunConfig, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(RunConfig, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'x = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot be read"):
        load(RunConfig, tmp_path / "latin.toml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_resolves_and_its_resolved_form_is_the_same_config(
    recipe: Path, tmp_path: Path
) -> None:
    config = load(RunConfig, recipe)
    again = load(RunConfig, write(tmp_path, to_toml(config)))
    assert again == config


def test_infinity_survives_a_round_trip(tmp_path: Path) -> None:
    config = load(RunConfig, None, ["optim.clip=inf"])
    assert load(RunConfig, write(tmp_path, to_toml(config))).optim.clip == float("inf")


def test_difference_holds_what_was_set_and_nothing_else() -> None:
    config = load(RunConfig, None, ["optim.lr=0.5", "model.rope.theta=5e5"])
    assert difference(config) == {"optim": {"lr": 0.5}, "model": {"rope": {"theta": 5e5}}}
    assert difference(RunConfig()) == {}


def test_a_preset_is_the_base_and_keys_change_it() -> None:
    config = load(
        RunConfig, None, ["model.preset=olmoe-1b-7b", "model.num_layers=8", "model.moe.top_k=4"]
    )
    assert (config.model.num_layers, config.model.d_model) == (8, 2048)
    assert config.model.moe is not None
    assert (config.model.moe.num_experts, config.model.moe.top_k) == (64, 4)
    assert load(RunConfig, None, ["model.preset=qwen3-0.6b"]).model.qk_norm == "head"


def test_overlay_leaves_its_arguments_alone() -> None:
    base, changes = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}, "e": 4}
    assert overlay(base, changes) == {"a": {"b": 9, "c": 2}, "d": 3, "e": 4}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_the_names_people_type_exist() -> None:
    typed = [
        "train.steps=3", "train.tokens_per_step=2048", "train.seed=1", "optim.lr=1", "optim.clip=1",
        "model.num_layers=2", "data.path=x", "checkpoint.every=1", "eval.every=1",
        "parallel.data.engine=ddp",
    ]  # fmt: skip
    config = load(RunConfig, None, typed)
    assert config.recompute.mode == "none"
    assert tomllib.loads(to_toml(config))["data"]["path"] == "x"


def test_init_from_takes_the_folders_model_where_the_recipe_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.toml").write_text("[model]\nd_model = 64\nnum_layers = 3\n")
    config = load_run_config(None, [f"train.init_from={folder}"])
    assert (config.model.d_model, config.model.num_layers) == (64, 3)
    assert config.train.init_from == str(folder)


@pytest.mark.parametrize("given", ["tensorboard", '["tensorboard"]'])
def test_one_tracker_needs_no_list(given: str) -> None:
    assert load(RunConfig, None, [f"track.to={given}"]).track.to == ("tensorboard",)
    assert load(RunConfig, None, ["track.to=wandb,trackio"]).track.to == ("wandb", "trackio")
