"""Training that starts from the weights of a model folder."""

from pathlib import Path

import pytest
import torch

from slipstream.models import ModelConfig, MoEConfig, Transformer
from slipstream.models.folder import save_model_folder
from slipstream.train import load_model
from tests.train.runs import records, slipstream


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    moe = MoEConfig(num_experts=4, top_k=2, d_ff=32)
    config = ModelConfig(
        vocab_size=257, num_layers=2, d_model=32, num_heads=4, head_dim=8, moe=moe, max_seq_len=64
    )
    torch.manual_seed(7)
    model = Transformer(config)
    save_model_folder(model, config, tmp_path / "model", None)
    return tmp_path / "model"


def recipe(tmp_path: Path, text: str = "") -> str:
    path = tmp_path / "recipe.toml"
    common = "[data]\nseq_len = 32\n[train]\nsteps = 1\ntokens_per_step = 64\n"
    path.write_text(common + "[optim]\nlr = 1e-30\nweight_decay = 0.0\n" + text)
    return str(path)


def train(corpus: Path, run: Path, path: str, *extra: str) -> tuple[int, str]:
    done = slipstream("train", path, f"data.path={corpus}", *extra, "--run-dir", str(run))
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "text", ["", "[model.moe]\naux_loss = 0.01\n", "[model]\nd_model = 32\nnum_heads = 4\n"]
)
def test_weights_are_the_folders_and_training_settings_the_recipes(
    text: str, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, error = train(corpus, run, recipe(tmp_path, text), f"train.init_from={folder}")
    assert code == 0, error
    trained, given = load_model(run), load_model(folder)
    assert trained.config.moe is not None
    assert trained.config.moe.aux_loss == (0.01 if "aux_loss" in text else 0.0)
    for name, value in given.named_parameters():
        assert torch.equal(trained.get_parameter(name), value), name
    if "aux_loss" in text:
        assert records(run)[0]["router_loss"] > 0.015


def test_another_architecture_is_refused_by_key(folder: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = (f"train.init_from={folder}", "model.moe.top_k=1")
    code, error = train(corpus, run, recipe(tmp_path), *given)
    assert code == 2
    assert "model.moe.top_k = 1" in error
    assert f"{folder} has 2" in error
    assert not run.exists()


def test_a_run_goes_on_without_the_weights_it_began_with(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run, path = tmp_path / "run", recipe(tmp_path)
    given = f"train.init_from={folder}"
    assert train(corpus, run, path, given) == (0, "")
    (folder / "model.safetensors").unlink()
    assert train(corpus, run, path, given, "train.steps=2", "--resume") == (0, "")
    assert [r["step"] for r in records(run) if "loss" in r] == [1, 2]


def test_a_run_folder_is_as_good_as_a_model_folder(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    first, second, path = tmp_path / "first", tmp_path / "second", recipe(tmp_path)
    assert train(corpus, first, path, f"train.init_from={folder}") == (0, "")
    assert train(corpus, second, path, f"train.init_from={first}") == (0, "")
    for name, value in load_model(first).named_parameters():
        assert torch.equal(load_model(second).get_parameter(name), value), name
