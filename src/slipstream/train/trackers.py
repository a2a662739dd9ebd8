"""Adapters that pass metrics on to TensorBoard, Weights & Biases or trackio."""

import uuid
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from slipstream.errors import DependencyError
from slipstream.train.config import TrackConfig
from slipstream.train.run_folder import replace_file

WANDB_ID = ".wandb_id"


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""

    def finish(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Event files in the run's ``events`` folder; steps that are done again replace the old."""

    def __init__(
        self, run_dir: Path, project: str, config: dict[str, Any], first_step: int
    ) -> None:
        _require("tensorboard")
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(run_dir / "events"), purge_step=first_step + 1)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Flush and close."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run named after the run folder, the same one when it is resumed."""

    def __init__(
        self, run_dir: Path, project: str, config: dict[str, Any], first_step: int
    ) -> None:
        wandb = _require("wandb")
        file = run_dir / WANDB_ID
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        # A run that starts over is another run there: steps of one can only go up.
        name = known if known and first_step > 0 else uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                config=config,
                dir=str(run_dir),
                id=name,
                resume="allow",
            )
        except wandb.Error as error:
            raise DependencyError(
                f"track.to asks for wandb, which does not start: {error}; run wandb login, set "
                "WANDB_MODE=offline, or leave it out"
            ) from None
        replace_file(file, f"{name}\n".encode())

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        self._run.log(metrics, step=step)

    def finish(self) -> None:
        """Flush and close."""
        self._run.finish()


class Trackio:
    """A trackio run named after the run folder, the same one when it is resumed."""

    def __init__(
        self, run_dir: Path, project: str, config: dict[str, Any], first_step: int
    ) -> None:
        self._trackio = _require("trackio")
        self._trackio.init(
            project=project,
            name=run_dir.name,
            config=config,
            resume="allow" if first_step > 0 else "never",
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        self._trackio.log(metrics, step=step)

    def finish(self) -> None:
        """Flush and close."""
        self._trackio.finish()


_TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def check_trackers(config: TrackConfig) -> None:
    """DependencyError for a tracker that is asked for and not installed; starts nothing."""
    for name in config.to:
        _require(name)


def start_trackers(
    config: TrackConfig, run_dir: Path, values: dict[str, Any], first_step: int = 0
) -> list[Tracker]:
    """Start every tracker asked for; DependencyError for one that is not installed.

    ``first_step``: steps done before this start, 0 for a new run.
    """
    return [_TRACKERS[name](run_dir, config.project, values, first_step) for name in config.to]


def flatten(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a nested record under slash-joined names."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        elif isinstance(value, (int, float)) and key != "step":
            flat[prefix + key] = float(value)
    return flat


def _require(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise DependencyError(
            f"track.to asks for {name}, which is not installed; pip install "
            "'slipstream-train[track]' or leave it out"
        ) from None
