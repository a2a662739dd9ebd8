"""Proof on this machine: every op against its fp64 truth, and what else an op promises.

Not in ``slipstream.ops``: an op never pays for being verified. Suites of cases live in ``cases/``,
one module per op; tests and ``slipstream verify`` run the same ones.
"""

from slipstream.verify.budget import Figure, Results, compare, results
from slipstream.verify.case import Case, Promise, Suite, suites
from slipstream.verify.certificate import certificate
from slipstream.verify.checks import Outcome
from slipstream.verify.run import DTYPES, Options, Row, passed, pick_device, verify

__all__ = [
    "DTYPES",
    "Case",
    "Figure",
    "Options",
    "Outcome",
    "Promise",
    "Results",
    "Row",
    "Suite",
    "certificate",
    "compare",
    "passed",
    "pick_device",
    "results",
    "suites",
    "verify",
]
