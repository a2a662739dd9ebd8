"""The trainer: run config, step, loop, checkpoints, metrics, schedules."""

from slipstream.train.config import RunConfig, load_run_config
from slipstream.train.loop import train
from slipstream.train.restore import Trained, load_model, load_trained

__all__ = ["RunConfig", "Trained", "load_model", "load_run_config", "load_trained", "train"]
