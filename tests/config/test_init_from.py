"""The model of ``train.init_from`` is the one that is validated, shown and trained."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.config import app
from slipstream.errors import CheckpointError, ConfigError
from slipstream.train.config import load_run_config


def model_folder(parent: Path, text: str) -> Path:
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.toml").write_text(f"[model]\n{text}\n")
    return folder


def recipe(parent: Path, text: str) -> Path:
    path = parent / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("in_recipe", [True, False])
def test_rules_are_about_the_folders_model_not_the_default(in_recipe: bool, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "max_seq_len = 8192")
    text = f"[data]\nseq_len = 4096\n[train]\ninit_from = '{folder}'\n" if in_recipe else ""
    given = [] if in_recipe else ["data.seq_len=4096", f"train.init_from={folder}"]
    config = load_run_config(recipe(tmp_path, text), given)
    assert (config.model.max_seq_len, config.data.seq_len) == (8192, 4096)


def test_a_conflict_with_the_folders_model_is_a_config_error(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "max_seq_len = 512")
    path = recipe(tmp_path, f"[train]\ninit_from = '{folder}'\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [])
    message = str(caught.value)
    assert message.startswith(f"{path} with the model of {folder}: ")
    assert "data.seq_len = 1024 exceeds model.max_seq_len = 512" in message


def test_a_model_of_the_recipe_is_taken_over_the_folders(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "num_layers = 3")
    path = recipe(tmp_path, f"[model]\nnum_layers = 5\n[train]\ninit_from = '{folder}'\n")
    assert load_run_config(path, []).model.num_layers == 5


def test_a_wrong_model_of_the_folder_names_the_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "num_heads = 3")
    with pytest.raises(ConfigError, match=r"config\.toml: model: .*d_model = 256 is not divisible"):
        load_run_config(None, [f"train.init_from={folder}"])


@pytest.mark.parametrize("value", ["3", "[1]", "true", "{a = 1}"])
def test_an_init_from_that_is_no_path(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.init_from.*must be text"):
        load_run_config(recipe(tmp_path, f"[train]\ninit_from = {value}\n"), [])
    with pytest.raises(ConfigError, match=r"train = 3: must be a table"):
        load_run_config(None, ["train=3"])


def test_a_run_folder_that_began_with_a_preset(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, 'preset = "qwen3-0.6b"\nnum_layers = 3')
    config = load_run_config(None, [f"train.init_from={folder}"])
    assert (config.model.num_layers, config.model.qk_norm) == (3, "none")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_run_config(None, [f"train.init_from={tmp_path}"])


def test_a_folder_whose_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path, "num_layers = 3").rename(tmp_path / "123")
    monkeypatch.chdir(tmp_path)
    assert load_run_config(None, ["train.init_from=123"]).model.num_layers == 3


@pytest.mark.parametrize("options", [[], ["--diff"]])
def test_show_prints_the_model_that_would_be_trained(options: list[str], tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "max_seq_len = 8192\nnum_layers = 3")
    path = recipe(tmp_path, "[data]\nseq_len = 4096\n")
    words = ["show", str(path), f"train.init_from={folder}", *options]
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    model = tomllib.loads(shown.output)["model"]
    assert (model["max_seq_len"], model["num_layers"]) == (8192, 3)
