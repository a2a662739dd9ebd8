"""The trainer on CUDA devices: it learns, resumes bit for bit, compiles, and spreads over ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.conftest import corpus
from tests.train.runs import TORCHRUN, arguments, records, slipstream

__all__ = ["corpus"]

ALIGNED = ("model.d_model=64", "model.moe.d_ff=64", "model.moe.shared_d_ff=32")
EXACT = ("train.deterministic=true", *ALIGNED)


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
