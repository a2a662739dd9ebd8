"""Where a training step's time goes, why, and what to do about it, from any PyTorch profile.

``job = read("traces/")``, then ``counted = account(job)`` for the figures of every rank, then
``findings(counted)`` for what costs time, ranked; ``compare(before, after)`` takes two accounts.
"""

from slipstream.diagnose.account import account
from slipstream.diagnose.compare import Comparison, compare
from slipstream.diagnose.figures import Account, JobAccount, Split
from slipstream.diagnose.findings import Finding, Findings
from slipstream.diagnose.findings import find as findings
from slipstream.diagnose.read import Limits, read
from slipstream.diagnose.trace import Job, Kind, Trace

__all__ = [
    "Account",
    "Comparison",
    "Finding",
    "Findings",
    "Job",
    "JobAccount",
    "Kind",
    "Limits",
    "Split",
    "Trace",
    "account",
    "compare",
    "findings",
    "read",
]
