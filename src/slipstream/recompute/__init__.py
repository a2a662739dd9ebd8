"""Activation recomputation: the settings of a run."""

from slipstream.recompute.config import RecomputeConfig

__all__ = ["RecomputeConfig"]
