"""The trainer on CUDA devices: it learns, resumes bit for bit, compiles, and spreads over ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.train import load_model
from slipstream.train.config import load_run_config
from slipstream.train.metrics import read_metrics
from tests.train.conftest import corpus
from tests.train.runs import RECIPES, TORCHRUN, arguments, records, slipstream

__all__ = ["corpus"]

ALIGNED = ("model.d_model=64", "model.moe.d_ff=64", "model.moe.shared_d_ff=32")
EXACT = ("train.deterministic=true", *ALIGNED)
WAITING = """
import torch
from slipstream.cli import main
plain = torch.nn.Embedding.forward
torch.nn.Embedding.forward = lambda self, x: plain(self, x) * float(plain(self, x).sum() != 0)
main()
"""


def steps(run: Path) -> list[dict]:
    return [record for record in records(run) if "loss" in record]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", ["moe", "dense"])
def test_it_learns(recipe: str, dtype: str, compiled: bool, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    extra = (f"train.dtype={dtype}", f"train.compile={str(compiled).lower()}")
    aligned = ALIGNED if recipe == "moe" else ()
    done = slipstream(*arguments(recipe, corpus, run, *extra, *aligned))
    assert done.returncode == 0, done.stderr
    assert steps(run)[-1]["loss"] < steps(run)[0]["loss"] - 0.8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_resume_is_bitwise_with_deterministic_kernels(
    dtype: str, corpus: Path, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    common = (*EXACT, f"train.dtype={dtype}", "optim.schedule=constant")
    assert slipstream(*arguments("moe", corpus, whole, *common)).returncode == 0
    assert slipstream(*arguments("moe", corpus, run, *common, "train.steps=5")).returncode == 0
    done = slipstream(*arguments("moe", corpus, run, *common), "--resume")
    assert done.returncode == 0, done.stderr
    assert steps(run) == steps(whole)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2], ids=["alone", "pair"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", ["moe", "dense"])
def test_a_cuda_graph_trains_what_eager_steps_train_to_the_bit(
    recipe: str, dtype: str, micro_batches: int, corpus: Path, tmp_path: Path
) -> None:
    values = load_run_config(RECIPES / f"{recipe}.toml", [])
    balance = ("model.moe.balance.threshold=1.25", "model.moe.balance.ramp=2")
    common = (
        "train.deterministic=true",
        f"train.dtype={dtype}",
        f"train.micro_batch={values.sequences_per_step // micro_batches}",
        "eval.every=4",
        *((*ALIGNED, *balance) if recipe == "moe" else ()),
    )
    eager, graph = tmp_path / "eager", tmp_path / "graph"
    assert slipstream(*arguments(recipe, corpus, eager, *common)).returncode == 0
    done = slipstream(*arguments(recipe, corpus, graph, *common, "train.cuda_graph=true"))
    assert done.returncode == 0, done.stderr
    assert records(graph) == records(eager)
    clocks = [record["time"] for record in read_metrics(graph / "metrics.jsonl")]
    assert all("graph_ms" in clock for clock in clocks if "step_ms" in clock)
    one, other = (load_model(run).state_dict() for run in (eager, graph))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.gpu
def test_a_run_with_a_cuda_graph_resumes_to_the_bit(corpus: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    common = (*EXACT, "optim.schedule=constant", "train.cuda_graph=true")
    assert slipstream(*arguments("moe", corpus, whole, *common)).returncode == 0
    assert slipstream(*arguments("moe", corpus, run, *common, "train.steps=5")).returncode == 0
    done = slipstream(*arguments("moe", corpus, run, *common), "--resume")
    assert done.returncode == 0, done.stderr
    assert steps(run) == steps(whole)


@pytest.mark.gpu
def test_compiled_layers_are_recorded(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    extra = ("train.compile=true", "train.cuda_graph=true", *ALIGNED)
    done = slipstream(*arguments("moe", corpus, run, *extra))
    assert done.returncode == 0, done.stderr
    assert steps(run)[-1]["loss"] < steps(run)[0]["loss"] - 0.8


@pytest.mark.gpu
def test_what_cannot_be_recorded_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    # A recording that breaks may leave its stream behind, so it gets a process of its own.
    command = arguments("dense", corpus, tmp_path / "run", "train.cuda_graph=true")
    done = subprocess.run(
        [sys.executable, "-c", WAITING, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be recorded" in done.stderr
    assert "set train.cuda_graph=false" in done.stderr


@pytest.mark.multi_gpu
def test_two_ranks_equal_one(corpus: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    common = (*ALIGNED, "train.dtype=fp32", "optim.eps=0.01", "train.steps=20")
    alone = slipstream(*arguments("moe", corpus, one, *common))
    assert alone.returncode == 0, alone.stderr
    pair = subprocess.run(
        [
            sys.executable,
            *TORCHRUN,
            "2",
            "-m",
            "slipstream",
            *arguments("moe", corpus, two, *common),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert pair.returncode == 0, pair.stderr
    bound = 20 * torch.finfo(torch.float32).eps
    for a, b in zip(steps(one), steps(two), strict=True):
        assert abs(a["loss"] - b["loss"]) <= bound * a["loss"], a["step"]
