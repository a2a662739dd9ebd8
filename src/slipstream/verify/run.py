"""Verify ops: every implementation that can run here, in every dtype, through every check."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.errors import ConfigError, HardwareError
from slipstream.ops import dispatch, triton_support
from slipstream.verify.case import Scale, Suite, select, suites
from slipstream.verify.checks import (
    Data,
    Outcome,
    Subject,
    Verdict,
    check_budget,
    check_compile,
    check_layout,
    check_promise,
    check_repeat,
    no_compiler,
)
from slipstream.verify.cuda import check_graph, check_sync

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("strided", "transposed", "offset")
COMPILED_IN = {"cpu": "fp32", "cuda": "bf16"}
"""A compiled graph is checked in one dtype, if that is among those asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The verdict on one implementation in one dtype."""

    op: str
    implementation: str
    dtype: str
    verdict: Verdict
    reason: str = ""
    """What failed first, or why nothing could run, or what was left out."""
    outcomes: tuple[Outcome, ...] = ()

    @property
    def worst(self) -> float | None:
        """Largest error/allowed of the row; None where nothing was measured."""
        ratios = [figure.ratio for outcome in self.outcomes for figure in outcome.figures]
        # NaN is worse than any number, and max would drop it.
        return next((r for r in ratios if r != r), max(ratios, default=None))

    @property
    def cases(self) -> int:
        """Calls and promises that ran."""
        return len({o.case for o in self.outcomes if o.verdict != "skipped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to verify."""

    only: tuple[str, ...] = ()
    """Ops or groups of ops; empty: all."""
    device: str | None = None
    """``cpu`` or ``cuda``; None: a GPU if there is one."""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    """Names in ``DTYPES``."""
    quick: bool = False
    """Without the compiler."""


def verify(options: Options, progress: Callable[[str], None] | None = None) -> list[Row]:
    """Judge what ``options`` names; ``progress`` is told each op and implementation.

    Rows of op "all" say which checks could not run here. Raises ConfigError, HardwareError.
    """
    device, dtypes = pick_device(options.device), _dtypes(options.dtypes)
    have = suites()
    rows = []
    for op in select(list(options.only)):
        if op in have:
            rows += _rows(have[op], device, dtypes, options.quick, progress)
        else:
            reason = f"nothing verifies this op: add slipstream/verify/cases/{op}.py"
            rows.append(_empty(op, "all", "all", "fail", reason))
    return rows + _left_out(device, dtypes, options.quick)


def pick_device(name: str | None) -> torch.device:
    """The device of that name; None is a GPU if there is one. Raises Config- or HardwareError."""
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise HardwareError("--device cuda: PyTorch finds no GPU here; see slipstream env")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def passed(rows: list[Row]) -> bool:
    """Whether something was verified and nothing failed."""
    verdicts = {row.verdict for row in rows}
    return "fail" not in verdicts and "pass" in verdicts


def _dtypes(names: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in DTYPES:
            raise ConfigError(f"--dtype {name}: expected one of {', '.join(DTYPES)}")
    return [name for name in DTYPES if name in names]


def _rows(
    suite: Suite,
    device: torch.device,
    dtypes: list[str],
    quick: bool,
    progress: Callable[[str], None] | None,
) -> list[Row]:
    scale: Scale = (
        "large" if device.type == "cuda" else "small" if _interprets(device) else "normal"
    )
    cases = suite.cases(scale)
    # Made once for all implementations: the truth costs as much as what is held to it.
    data = {name: [Data(case, device, DTYPES[name]) for case in cases] for name in dtypes}
    rows: list[Row] = []
    for name in dispatch.implementations(suite.op):
        if progress is not None:
            progress(f"{suite.op} {name}")
        for dtype in dtypes:
            served = any(row.dtype == dtype and row.verdict != "skipped" for row in rows)
            backend = None if quick else _backend(device, dtype, served=served)
            rows.append(_row(suite, name, dtype, data[dtype], backend))
    return rows


def _row(suite: Suite, name: str, dtype: str, data: list[Data], backend: str | None) -> Row:
    device = data[0].device
    if dtype == "bf16" and name in suite.products and _interprets(device):
        reason = "Triton's interpreter multiplies bf16 matrices wrongly"
        return _empty(suite.op, name, dtype, "skipped", reason)
    subject = Subject(op=suite.op, implementation=name, device=device, dtype=DTYPES[dtype])
    outcomes = _outcomes(suite, subject, data, backend)
    failed = [outcome for outcome in outcomes if outcome.verdict == "fail"]
    skipped = [outcome for outcome in outcomes if outcome.verdict == "skipped"]
    verdict: Verdict = "fail" if failed else "pass"
    if len(skipped) == len(outcomes):
        verdict = "skipped"
    first = next(iter(failed), None)
    return Row(
        op=suite.op,
        implementation=name,
        dtype=dtype,
        verdict=verdict,
        reason=_summary(skipped, verdict) if first is None else _describe(first),
        outcomes=tuple(outcomes),
    )


def _outcomes(
    suite: Suite, subject: Subject, data: list[Data], backend: str | None
) -> list[Outcome]:
    found = [check_budget(subject, each) for each in data]
    if all(outcome.verdict == "skipped" for outcome in found):
        return found
    # Interpreted kernels run one program after the other: one repetition shows as much as many.
    often = data[:1] if _interprets(subject.device) else data
    found += [check_repeat(subject, each) for each in often]
    found += [check_layout(subject, data[0], layout) for layout in LAYOUTS]
    found += [check_promise(subject, promise) for promise in suite.promises]
    if backend is not None:
        compiled = partial(check_compile, backend=backend)
        found.append(_unless_exempt(suite, subject, data[0], "compile", compiled))
    if subject.device.type == "cuda":
        found += [_unless_exempt(suite, subject, each, "sync", check_sync) for each in data]
        found.append(_unless_exempt(suite, subject, data[0], "graph", check_graph))
    return found


def _unless_exempt(
    suite: Suite,
    subject: Subject,
    data: Data,
    check: str,
    run: Callable[[Subject, Data], Outcome],
) -> Outcome:
    reason = suite.exempt.get((subject.implementation, check))
    if reason is None:
        return run(subject, data)
    return Outcome(case=data.case.name, check=check, verdict="skipped", detail=reason)


def _backend(device: torch.device, dtype: str, *, served: bool) -> str | None:
    """What compiles: code is generated for the implementation that serves, others are traced."""
    if dtype != COMPILED_IN[device.type] or no_compiler(device) is not None:
        return None
    return "aot_eager" if served else "inductor"


def _interprets(device: torch.device) -> bool:
    return device.type == "cpu" and triton_support.interpreting()


def _summary(skipped: list[Outcome], verdict: Verdict) -> str:
    if verdict == "skipped":
        return skipped[0].detail
    reasons = dict.fromkeys(f"{outcome.check}: {outcome.detail}" for outcome in skipped)
    return "left out: " + "; ".join(reasons) if reasons else ""


def _describe(outcome: Outcome) -> str:
    return f"{outcome.check} of {outcome.case}: {outcome.detail}"


def _empty(op: str, implementation: str, dtype: str, verdict: Verdict, reason: str) -> Row:
    return Row(op=op, implementation=implementation, dtype=dtype, verdict=verdict, reason=reason)


def _left_out(device: torch.device, dtypes: list[str], quick: bool) -> list[Row]:
    reasons = []
    if quick:
        reasons.append("torch.compile: left out by --quick")
    elif COMPILED_IN[device.type] not in dtypes:
        reasons.append(f"torch.compile: checked in {COMPILED_IN[device.type]} on {device.type}")
    elif (broken := no_compiler(device)) is not None:
        reasons.append(f"torch.compile: {broken}")
    if device.type != "cuda":
        reasons.append("host synchronisation and CUDA graphs: on a GPU only")
    return [_empty("all", "all", "all", "skipped", reason) for reason in reasons]
