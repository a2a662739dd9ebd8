"""Tables and pictures of finished runs, rebuilt from their metrics.jsonl alone."""

from slipstream.report.figures import loss_curve
from slipstream.report.summary import Summary, summarise

__all__ = ["Summary", "loss_curve", "summarise"]
