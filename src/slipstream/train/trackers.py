"""Adapters that pass metrics on to TensorBoard, Weights & Biases or trackio."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from slipstream.errors import DependencyError
from slipstream.train.config import TrackConfig


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""

    def finish(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Event files in the run's ``events`` folder."""

    def __init__(self, run_dir: Path, project: str, config: dict[str, Any]) -> None:
        _require("tensorboard")
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(run_dir / "events"))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Flush and close."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run named after the run folder."""

    def __init__(self, run_dir: Path, project: str, config: dict[str, Any]) -> None:
        wandb = _require("wandb")
        self._run = wandb.init(
            project=project, name=run_dir.name, config=config, dir=str(run_dir), resume="allow"
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        self._run.log(metrics, step=step)

    def finish(self) -> None:
        """Flush and close."""
        self._run.finish()


class Trackio:
    """A trackio run named after the run folder."""

    def __init__(self, run_dir: Path, project: str, config: dict[str, Any]) -> None:
        self._trackio = _require("trackio")
        self._trackio.init(project=project, name=run_dir.name, config=config)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        self._trackio.log(metrics, step=step)

    def finish(self) -> None:
        """Flush and close."""
        self._trackio.finish()


_TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def start_trackers(config: TrackConfig, run_dir: Path, values: dict[str, Any]) -> list[Tracker]:
    """Start every tracker asked for; DependencyError for one that is not installed."""
    return [_TRACKERS[name](run_dir, config.project, values) for name in config.to]


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
