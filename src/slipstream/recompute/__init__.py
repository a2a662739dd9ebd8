"""Activation memory for time: sites measured, a plan under a budget, applied to the model."""

from slipstream.recompute.config import Mode, RecomputeConfig
from slipstream.recompute.plan import Costs, Plan, Row, apply, fixed, plan
from slipstream.recompute.table import lines

__all__ = ["Costs", "Mode", "Plan", "RecomputeConfig", "Row", "apply", "fixed", "lines", "plan"]
