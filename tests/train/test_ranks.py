"""Two ranks train what one rank trains."""

import signal
from pathlib import Path

import pytest
import torch

from slipstream.train import load_model
from slipstream.train.checkpoint import find
from tests.train.runs import arguments, records, slipstream, start, stop_at_step, torchrun

# Adam divides a gradient by its own size: where that is far below eps the update stays in
# proportion to the gradient, and so does a rounding error; at 1e-8 noise alone decides signs.
LARGE_EPS = "optim.eps=0.01"
TWENTY = ("train.steps=20", "checkpoint.every=10", "eval.every=10")


@pytest.mark.parametrize("recipe", ["moe", "dense"])
def test_two_ranks_equal_one_rank_with_twice_the_batch(
    recipe: str, corpus: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = slipstream(*arguments(recipe, corpus, one, *TWENTY, LARGE_EPS))
    pair = torchrun(2, *arguments(recipe, corpus, two, *TWENTY, LARGE_EPS))
    assert alone.returncode == pair.returncode == 0, alone.stderr + pair.stderr
    assert "slipstream" not in pair.stderr, "no warning is ours to give"
    steps = [[r for r in records(run) if "loss" in r] for run in (one, two)]
    assert [r["step"] for r in steps[1]] == list(range(1, 21))
    # One fp32 rounding for each of the twenty steps.
    bound = 20 * torch.finfo(torch.float32).eps
    for a, b in zip(*steps, strict=True):
        assert abs(a["loss"] - b["loss"]) <= bound * a["loss"], a["step"]
    weights = load_model(two).state_dict()
    for name, value in load_model(one).state_dict().items():
        assert (weights[name] - value).abs().max() <= bound * value.abs().max(), name


def test_checkpoint_of_two_ranks_resumes_on_one_and_back(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for ranks, steps in ((2, 8), (1, 14), (2, 20)):
        changed = (f"train.steps={steps}", "optim.schedule=constant", LARGE_EPS)
        command = (*arguments("dense", corpus, run, *TWENTY[1:], *changed), "--resume")
        done = slipstream(*command) if ranks == 1 else torchrun(ranks, *command)
        assert done.returncode == 0, done.stderr
        saved = find(run / "checkpoints")[-1].meta
        assert (saved.step, saved.world, saved.next_sample) == (steps, ranks, steps * 8)
    constant = tmp_path / "constant"
    alone = ("optim.schedule=constant", LARGE_EPS)
    slipstream(*arguments("dense", corpus, constant, *TWENTY, *alone))
    ours, theirs = (
        [r["loss"] for r in records(folder) if "loss" in r] for folder in (run, constant)
    )
    assert ours == pytest.approx(theirs, rel=20 * torch.finfo(torch.float32).eps)


def test_a_batch_ranks_cannot_share_is_refused(corpus: Path, tmp_path: Path) -> None:
    done = torchrun(2, *arguments("dense", corpus, tmp_path / "run", "train.tokens_per_step=96"))
    assert done.returncode != 0
    assert "train.tokens_per_step = 96 is 3 sequences, which 2 ranks cannot share" in done.stderr
    assert not (tmp_path / "run").exists()


def test_two_ranks_stop_on_sigterm_and_resume_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert torchrun(2, *arguments("moe", corpus, whole)).returncode == 0
    process = start(*arguments("moe", corpus, run, "checkpoint.every=0"), ranks=2)
    stop_at_step(process, run, 3, signal.SIGTERM)
    (saved,) = find(run / "checkpoints")
    assert saved.meta.world == 2
    assert 3 <= saved.meta.step < 12
    done = torchrun(2, *arguments("moe", corpus, run, "checkpoint.every=3"), "--resume")
    assert done.returncode == 0, done.stderr
    assert records(run) == records(whole)
    weights = load_model(run).state_dict()
    for name, value in load_model(whole).state_dict().items():
        assert torch.equal(weights[name], value), name
