"""Tables and pictures of finished runs, rebuilt from their metrics.jsonl alone, and of diagnoses.

The public names load on first use: a diagnosis is shown without the trainer and torch.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {"Summary": "summary", "loss_curve": "figures", "summarise": "summary"}

__all__ = ["Summary", "loss_curve", "summarise"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slipstream.report' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.report.{_PUBLIC[name]}"), name)
