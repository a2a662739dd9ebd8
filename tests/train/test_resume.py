"""A run that is stopped, by any means, goes on as if it had not been."""

import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from slipstream.train import load_model
from slipstream.train.checkpoint import find
from tests.train.runs import arguments, records, slipstream, start, stop_at_step

STEPS = 12


@pytest.fixture(scope="module")
def whole_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    done = slipstream(*arguments("moe", corpus, run))
    assert done.returncode == 0, done.stderr
    return run


def assert_same_end(run: Path, whole: Path) -> None:
    assert records(run) == records(whole)
    for key, value in load_model(whole).state_dict().items():
        assert torch.equal(load_model(run).state_dict()[key], value), key
    ends = [find(r / "checkpoints")[-1] for r in (run, whole)]
    for name in ("__0_0.distcp",):
        assert (ends[0].path / name).read_bytes() == (ends[1].path / name).read_bytes()


def test_killed_at_a_random_step_and_resumed_is_bitwise_the_run_not_killed(
    corpus: Path, whole_run: Path, tmp_path: Path
) -> None:
    # Not seeded on purpose: over time every step gets its turn.
    step = random.SystemRandom().randint(1, STEPS - 2)
    run = tmp_path / "run"
    # A slow machine is no help here: the kill must land before the end, so the run is long.
    process = start(*arguments("moe", corpus, run))
    stop_at_step(process, run, step, signal.SIGKILL)
    done = slipstream(*arguments("moe", corpus, run), "--resume")
    assert done.returncode == 0, done.stderr
    assert len(records(run)) == STEPS + 3
    assert_same_end(run, whole_run)


def test_killed_while_a_checkpoint_is_written_uses_the_one_before(
    corpus: Path, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    last = find(run / "checkpoints")[-1].path
    last.rename(last.with_name(f".{last.name}.partial"))
    done = slipstream(*arguments("moe", corpus, run), "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed from step_00000009" in done.stdout
    assert_same_end(run, whole_run)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_asked_to_stop_saves_and_exits_0(
    how: int, corpus: Path, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(*arguments("moe", corpus, run, "checkpoint.every=0"))
    stop_at_step(process, run, 2, how)
    assert process.returncode == 0
    saved = find(run / "checkpoints")[-1].meta.step
    assert 2 <= saved < STEPS
    assert records(run)[-1]["step"] == saved
    done = slipstream(*arguments("moe", corpus, run, "checkpoint.every=3"), "--resume")
    assert done.returncode == 0, done.stderr
    assert_same_end(run, whole_run)


def test_resume_without_a_checkpoint_starts_over(
    corpus: Path, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(*arguments("moe", corpus, run, "checkpoint.every=0"))
    stop_at_step(process, run, 2, signal.SIGKILL)
    assert not find(run / "checkpoints")
    done = slipstream(*arguments("moe", corpus, run, "checkpoint.every=3"), "--resume")
    assert done.returncode == 0, done.stderr
    assert_same_end(run, whole_run)


def test_resume_of_a_finished_run_does_nothing(corpus: Path, whole_run: Path) -> None:
    before = (whole_run / "metrics.jsonl").read_bytes()
    done = slipstream(*arguments("moe", corpus, whole_run), "--resume")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_resume_names_the_settings_that_changed(
    corpus: Path, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    done = slipstream(*arguments("moe", corpus, run, "train.steps=13", "optim.lr=0.02"), "--resume")
    assert done.returncode == 0, done.stderr
    assert "changed since the run began: train.steps: 12 -> 13" in done.stdout
    assert "changed since the run began: optim.lr: 0.01 -> 0.02" in done.stdout
    assert records(run)[-1]["step"] == 13
