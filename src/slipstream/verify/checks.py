"""The checks of one implementation on one case: budget, repetition, layouts, compiler.

Every check returns an ``Outcome``. An implementation that raises has failed that check, one that
refuses a call has not: its reason is kept. Where nothing but the largest error of a tensor is over
its budget, or an error of few numbers, more inputs are drawn and all of them, the first included,
judged as one; any other fault fails at once. What needs a GPU is in ``cuda.py``.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch.utils import deterministic

from slipstream.errors import HardwareError
from slipstream.ops import dispatch
from slipstream.verify.budget import (
    Figure,
    Results,
    bitwise_equal,
    cast,
    decide,
    make_leaves,
    named_outputs,
    upstream,
    with_gradients,
)
from slipstream.verify.case import Case, Promise

Verdict = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one check of one case found."""

    case: str
    """Name of the case or promise."""
    check: str
    """``budget``, ``repeat``, ``layout``, ``promise``, ``compile``, ``sync`` or ``graph``."""
    verdict: Verdict
    """Skipped: refused by the implementation, or cannot apply to it."""
    detail: str = ""
    """What is wrong, or why it was skipped."""
    figures: tuple[Figure, ...] = ()
    """Errors beside what they may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is being verified."""

    op: str
    implementation: str
    device: torch.device
    dtype: torch.dtype


class Data:
    """A case with its inputs, the eager results and the truth, made once for all implementations.

    Inputs come from the CPU's generator and fixed seeds: the same numbers on every machine.
    """

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.draws = [self.draw(seed) for seed in range(case.pool)]
        self._kept: dict[tuple[int, str | None, bool], Results] = {}

    def draw(self, seed: int) -> Results:
        """The inputs of one seed."""
        with torch.device("cpu"):
            drawn = self.case.inputs(torch.Generator("cpu").manual_seed(seed))
        return {
            name: (t if name in self.case.fp32 else cast(t, self.dtype)).to(self.device)
            for name, t in drawn.items()
        }

    def inputs(self, seed: int) -> Results:
        """The inputs of one seed, kept for the next implementation."""
        while len(self.draws) <= seed:
            self.draws.append(self.draw(len(self.draws)))
        return self.draws[seed]

    def eager(self, seed: int, layout: str | None = None) -> Results:
        """Results of the eager code in the dtype under test, on the inputs of one seed.

        In the memory layout of what it is the yardstick of: a library has a kernel for each.
        """
        return self._keep(seed, layout, None)

    def truth(self, seed: int) -> Results:
        """Results of the eager code in fp64."""
        return self._keep(seed, None, torch.float64)

    def _keep(self, seed: int, layout: str | None, run_in: torch.dtype | None) -> Results:
        key = (seed, layout, run_in is not None)
        if key not in self._kept:
            inputs = self.inputs(seed)
            self._kept[key] = self.run(self.case.eager, inputs, run_in, draw=seed, layout=layout)
        return self._kept[key]

    def run(
        self,
        function: Callable,
        inputs: Results,
        run_in: torch.dtype | None = None,
        *,
        draw: int = 0,
        layout: str | None = None,
    ) -> Results:
        """Outputs and gradients of ``function``; ``draw`` gives the upstream gradients."""
        given = {name: laid_out(t, layout) for name, t in inputs.items()}
        leaves = make_leaves(given, run_in, self.case.wanted)
        outputs = named_outputs(function(**leaves))
        grads = [laid_out(grad, layout) for grad in upstream(outputs, self.dtype, draw)]
        return with_gradients(outputs, leaves, grads)

    @property
    def unit(self) -> torch.dtype | None:
        """The dtype whose rounding unit the budget adds."""
        return None if self.case.own_units else self.dtype


def check_budget(subject: Subject, data: Data) -> Outcome:
    """Outputs and gradients against the truth, while uninitialised memory holds NaN."""

    def run() -> tuple[list[str], list[Figure]]:
        return _held_to_budget(data, data.case.call, poison=True)

    return judge(subject, data.case.name, "budget", run)


def check_repeat(subject: Subject, data: Data) -> Outcome:
    """Two more runs give the same bits."""

    def run() -> tuple[list[str], list[Figure]]:
        first, second = (data.run(data.case.call, data.draws[0]) for _ in range(2))
        return differences(first, second, "two runs differ"), []

    return judge(subject, data.case.name, "repeat", run)


def check_layout(subject: Subject, data: Data, layout: str) -> Outcome:
    """Inputs and upstream gradients in another memory layout: the budget of eager code in it.

    Where that is exceeded with the same bits as in the plain layout, the layout is not at fault (a
    library's kernel for it may be more exact than the one for copies), and the plain budget holds.
    """

    def run() -> tuple[list[str], list[Figure]]:
        problems, figures = _held_to_budget(data, data.case.call, poison=True, layout=layout)
        if problems and _same_bits_as_plain(data, layout):
            return _held_to_budget(data, data.case.call, poison=True)
        return problems, figures

    return judge(subject, f"{data.case.name}-{layout}", "layout", run)


def check_compile(subject: Subject, data: Data, backend: str) -> Outcome:
    """``torch.compile(fullgraph=True)`` compiles it, and stays within the same budget."""

    def run() -> tuple[list[str], list[Figure]]:
        torch._dynamo.reset()
        compiled = torch.compile(data.case.call, fullgraph=True, dynamic=False, backend=backend)
        return _held_to_budget(data, compiled, poison=False)

    return judge(subject, f"{data.case.name}-{backend}", "compile", run)


def _held_to_budget(
    data: Data, call: Callable, *, poison: bool, layout: str | None = None
) -> tuple[list[str], list[Figure]]:
    """Problems and figures of as many draws as it takes to tell luck from a fault."""

    def run(seed: int) -> tuple[Results, Results, Results]:
        with poisoned() if poison else nullcontext():
            actual = data.run(call, data.inputs(seed), draw=seed, layout=layout)
        return actual, data.eager(seed, layout), data.truth(seed)

    found, drawn = decide(run, data.case.pool, data.unit)
    more = f" in {drawn} draws" if drawn > data.case.pool else ""
    return [problem + more for problem in found.problems], found.figures


def _same_bits_as_plain(data: Data, layout: str) -> bool:
    """Whether the layout changes nothing at all, in any of the draws made so far."""

    def differ(seed: int) -> bool:
        inputs, call = data.inputs(seed), data.case.call
        # What is not written must not be taken for what the other run left in the same memory.
        with poisoned():
            plain = data.run(call, inputs, draw=seed)
            actual = data.run(call, inputs, draw=seed, layout=layout)
        return bool(differences(actual, plain, "differ"))

    return not any(differ(seed) for seed in range(len(data.draws)))


def check_promise(subject: Subject, promise: Promise) -> Outcome:
    """What must hold exactly."""

    def run() -> tuple[list[str], list[Figure]]:
        found = promise.holds(subject.device, subject.dtype)
        return ([found] if found else []), []

    return judge(subject, promise.name, "promise", run)


def judge(
    subject: Subject, case: str, check: str, run: Callable[[], tuple[list[str], list[Figure]]]
) -> Outcome:
    """Run a check with the implementation forced; what it raises becomes the verdict."""
    figures: list[Figure] = []
    try:
        with warnings.catch_warnings(), dispatch.force(**{subject.op: subject.implementation}):
            # Notes on deterministic mode and on other ops' fallbacks say nothing about this one.
            warnings.simplefilter("ignore")
            problems, figures = run()
    except HardwareError as error:
        refusal = _refusal(subject, error)
        if refusal is not None:
            return Outcome(case=case, check=check, verdict="skipped", detail=refusal)
        problems = [_one_line(error)]
    # Whatever an implementation raises is a finding, and the others must still be judged.
    except Exception as error:
        problems = [_one_line(error)]
    return Outcome(
        case=case,
        check=check,
        verdict="fail" if problems else "pass",
        detail="; ".join(problems),
        figures=tuple(figures),
    )


def differences(actual: Results, expected: Results, what: str) -> list[str]:
    """Names of the tensors that are not the same bits."""
    names = [name for name in expected if not bitwise_equal(actual[name], expected[name])]
    return [f"{what}: {', '.join(names)}"] if names else []


@contextmanager
def poisoned() -> Generator[None]:
    """Uninitialised memory holds NaN or the largest integer: what is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Poisoning is a part of deterministic mode, and on unless somebody turned it off.
    fills = deterministic.fill_uninitialized_memory  # pyrefly: ignore[missing-attribute]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # pyrefly: ignore[missing-attribute]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # pyrefly: ignore[missing-attribute]


def laid_out(tensor: torch.Tensor, layout: str | None) -> torch.Tensor:
    """The values of a floating-point tensor in another memory layout; None: as it is.

    ``strided``: every other element; ``transposed``: the last two dimensions swapped in memory;
    ``offset``: contiguous, one element off an aligned address.
    """
    if layout is None or not tensor.is_floating_point() or not tensor.dim():
        return tensor
    if layout == "strided":
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    flat = torch.cat((tensor.new_zeros(1), tensor.flatten()))
    return flat[1:].view(tensor.shape)


@lru_cache(maxsize=2)
def no_compiler(device: torch.device) -> str | None:
    """Why ``torch.compile`` cannot work on this machine; None if it does."""
    try:
        torch.compile(lambda x: torch.sin(x) + 1, fullgraph=True)(torch.ones(8, device=device))
    # A missing compiler shows in a dozen ways; each of them is the reason that is reported.
    except Exception as error:
        return f"the compiler does not work here: {_one_line(error)}"
    return None


def _refusal(subject: Subject, error: HardwareError) -> str | None:
    forced = f" (forced: {subject.implementation}); {subject.implementation}: "
    start = f"{subject.op}: no implementation serves this call{forced}"
    text = str(error)
    return text.removeprefix(start) if text.startswith(start) else None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
