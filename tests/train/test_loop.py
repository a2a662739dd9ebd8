"""The loop around the steps: guard, trackers, progress, evaluation."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import DependencyError
from slipstream.train.checkpoint import find
from slipstream.train.config import TrackConfig
from slipstream.train.evaluate import evaluate
from slipstream.train.metrics import MetricsFile, read_metrics
from slipstream.train.trackers import check_trackers, flatten, start_trackers
from tests.train.runs import arguments, environment, records, slipstream


def test_a_run_that_blows_up_stops_and_says_where(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # One step of this size leaves weights whose products overflow.
    blow_up = ("optim.lr=1e30", "optim.warmup_steps=0", "train.max_skipped=3")
    done = slipstream(*arguments("dense", corpus, run, *blow_up))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "3 steps in a row were not finite (train.max_skipped = 3)" in done.stderr
    assert "lower optim.lr" in done.stderr
    steps = records(run)
    assert [r["skipped"] for r in steps] == [False, True, True, True]
    assert steps[1]["grad_norm"] is None
    where = r"step 2 skipped: first non-finite value in the (output|gradient) of layers\.\d\."
    assert re.search(where, done.stdout)


def test_evaluation_is_the_same_for_any_batch(corpus: Path, tmp_path: Path) -> None:
    losses = []
    for size in (0, 1):
        run = tmp_path / f"run{size}"
        extra = (f"train.micro_batch={size}", "train.steps=1", "eval.tokens=999999")
        assert slipstream(*arguments("moe", corpus, run, *extra)).returncode == 0
        (evaluation,) = [r for r in records(run) if "val_loss" in r]
        losses.append(evaluation)
    assert losses[0]["val_tokens"] == losses[1]["val_tokens"] > 2048
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"], rel=1e-6)
    # The shards know that a byte is a token, but for one end of text in each document.
    per_byte = losses[0]["val_nats_per_byte"]
    assert losses[0]["val_loss"] < per_byte < 1.001 * losses[0]["val_loss"]


def test_a_corpus_without_validation_says_so(corpus: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train.bin").write_bytes((corpus / "train-00000.bin").read_bytes())
    run = tmp_path / "run"
    done = slipstream(*arguments("moe", raw, run, "train.steps=2"))
    assert done.returncode == 0, done.stderr
    assert "no validation split in data.path: evaluation is off" in done.stdout
    assert all("val_loss" not in r for r in records(run))


def test_a_terminal_gets_a_progress_bar(corpus: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *arguments("dense", corpus, tmp_path / "run")],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment() | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"\x1b[" in shown
    assert b"12/12" in shown


class FakeRun:
    """Stands for a run of wandb, and for trackio itself."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.settings: dict[str, object] = {}
        self.finished = False

    def init(self, **settings: object) -> "FakeRun":
        self.settings = settings
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_every_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun()
    (tmp_path / "run7").mkdir()
    module = types.ModuleType(name)
    for attribute in ("init", "log", "finish"):
        setattr(module, attribute, getattr(fake, attribute))
    monkeypatch.setitem(sys.modules, name, module)
    config = TrackConfig(to=(name,), project="mine")
    (tracker,) = start_trackers(config, tmp_path / "run7", {"optim": {"lr": 1}}, 0)
    tracker.log({"loss": 1.5}, 3)
    tracker.finish()
    assert fake.settings["project"] == "mine"
    assert fake.settings["name"] == "run7"
    assert fake.settings["config"] == {"optim": {"lr": 1}}
    assert fake.logged == [({"loss": 1.5}, 3)]
    assert fake.finished


def test_a_tracker_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match=r"wandb, which is not installed.*\[track\]"):
        check_trackers(TrackConfig(to=("wandb",)))


def test_records_are_flattened_to_numbers() -> None:
    record = {"step": 3, "loss": 1.0, "skipped": False, "moe": {"unused": 2}, "name": "x"}
    assert flatten(record) == {"loss": 1.0, "skipped": 0.0, "moe/unused": 2.0}


def test_metrics_after_the_checkpoint_are_cut_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1}\n{"step": 3}\n{"st')
    file = MetricsFile(path, keep_up_to=2)
    file.write({"step": 3, "again": True})
    file.close()
    assert read_metrics(path) == [
        {"step": 1},
        {"step": 2},
        {"step": 2, "val_loss": 1},
        {"step": 3, "again": True},
    ]


def test_validation_loss_is_without_label_smoothing(corpus: Path, tmp_path: Path) -> None:
    losses = []
    for smoothing in (0.0, 0.9):
        run = tmp_path / f"run{smoothing}"
        # Steps this small leave the weights as they are.
        extra = (f"train.label_smoothing={smoothing}", "optim.lr=1e-12", "train.steps=1")
        assert slipstream(*arguments("dense", corpus, run, *extra)).returncode == 0
        losses.append(next(r["val_loss"] for r in records(run) if "val_loss" in r))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_stop_during_evaluation_saves_first_and_evaluates_on_resume(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert slipstream(*arguments("moe", corpus, whole)).returncode == 0

    def interrupted(*args: Any) -> None:
        # The signal comes while the first evaluation, of step 4, is under way.
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr("slipstream.train.loop.evaluate", interrupted)
    done = slipstream(*arguments("moe", corpus, run))
    assert done.returncode == 0, done.stderr
    assert "asked to stop: saved step 4" in done.stdout
    assert all("val_loss" not in r for r in records(run))
    monkeypatch.undo()
    assert slipstream(*arguments("moe", corpus, run), "--resume").returncode == 0
    assert records(run) == records(whole)


def test_nobody_reading_along_does_not_stop_training(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = shlex.join([sys.executable, "-m", "slipstream", *arguments("dense", corpus, run)])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert len(done.stdout.splitlines()) == 1
    assert (done.returncode, done.stderr) == (0, "")
    assert records(run)[-1]["step"] == 12


def test_a_run_that_fails_keeps_the_checkpoint_it_was_writing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr("slipstream.train.checkpoint.Checkpoints.poll", lambda *_: None)
    monkeypatch.setattr("slipstream.train.loop.learning_rate", lambda *args: 1e30 * (args[1] == 3))
    limits = ("train.max_skipped=1", "checkpoint.every=3")
    done = slipstream(*arguments("dense", corpus, run, *limits))
    assert done.returncode == 2
    assert "not finite" in done.stderr
    assert [saved.meta.step for saved in find(run / "checkpoints")] == [3]
