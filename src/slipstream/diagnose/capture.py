"""Profile a few steady steps of our own trainer and write one trace per rank.

The trainer runs as it does in earnest; only evaluation, checkpoints and trackers are off. It stops
after the last recorded step and keeps nothing but the traces.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from slipstream.errors import ConfigError, TrainingError
from slipstream.train import RunConfig, load_run_config, train

WARM_UP_STEPS = 5
"""Steps before the first recorded one: compilation, first allocations and autotuning are over."""
_QUIET = ("eval.every=0", "checkpoint.every=0", "track.to=[]")


def capture(
    recipe: Path,
    overrides: Iterable[str] = (),
    *,
    steps: int = 3,
    out_dir: Path,
    warm_up: int = WARM_UP_STEPS,
    with_stack: bool = False,
) -> Path:
    """Train on ``recipe`` and record ``steps`` steps; this rank's trace, ``rankN.json.gz``.

    Under torchrun every rank calls it and writes its own file; all files are there when it returns.
    ``with_stack`` adds Python lines, and slows the host down. Raises ConfigError, and whatever
    training may raise.
    """
    if steps < 1 or warm_up < 1:
        raise ConfigError(f"{steps} steps after {warm_up} of warm-up: both must be at least 1")
    config = load_run_config(recipe, [*overrides, *_QUIET])
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"rank{os.environ.get('RANK', '0')}.json.gz"
    with TemporaryDirectory(prefix="slipstream-capture-") as folder:
        return capture_run(
            _long_enough(config, warm_up + steps),
            Path(folder) / "run",
            path,
            steps=steps,
            warm_up=warm_up,
            with_stack=with_stack,
        )


def capture_run(
    config: RunConfig,
    run_dir: Path,
    path: Path,
    *,
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    with_stack: bool = False,
) -> Path:
    """As ``capture``, for a config at hand: trains into ``run_dir`` and writes ``path``.

    The trainer's lines go to stderr: stdout belongs to the report.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and config.train.device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    recorded = []

    def save(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))
        recorded.append(path)

    # The profiler's own warm-up step is the last of ours.
    plan = schedule(wait=warm_up - 1, warmup=1, active=steps, repeat=1)
    with profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=save,
        record_shapes=True,
        with_stack=with_stack,
    ) as profiler:

        def after_step() -> bool:
            profiler.step()
            if recorded and torch.distributed.is_initialized():
                torch.distributed.barrier()
            return bool(recorded)

        with redirect_stdout(sys.stderr):
            train(config, run_dir, after_step=after_step)
    if not recorded:
        raise TrainingError(f"asked to stop before {steps} steps were recorded; run it again")
    return path


def _long_enough(config: RunConfig, steps: int) -> RunConfig:
    """The config with at least one step more than are run, so that the last is not special."""
    length = max(config.train.steps, steps + 1)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": length})})
