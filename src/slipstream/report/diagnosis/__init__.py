"""A diagnosis shown: in the terminal, as JSON, and as one self-contained page."""

from slipstream.report.diagnosis.as_json import to_json
from slipstream.report.diagnosis.change import show_change
from slipstream.report.diagnosis.html import page
from slipstream.report.diagnosis.terminal import show
from slipstream.report.diagnosis.view import NUMBERS, View, gather

__all__ = ["NUMBERS", "View", "gather", "page", "show", "show_change", "to_json"]
