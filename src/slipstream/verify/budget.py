"""Error budgets: how far an implementation may be from the truth, which is its fp64 reference.

An implementation passes when its error is at most 1.5 times the error of the same-dtype eager code
plus one rounding unit of the dtype at the magnitude of the truth: for the maximum and for the root
mean square of the error, for every output and every gradient. NaN never passes. Integer outputs
(decisions, maps, counts) must be equal. The largest error of a few numbers is luck, so several
draws of inputs can be judged as one: ``Comparison.may_be_luck`` says where more of them decide.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

FACTOR = 1.5
DRAWN = (1, 3, 9)
"""Times a pool of draws that is judged; the next number only where what is over may be luck."""
FEW = 32
"""Numbers of which the root mean square hangs on luck as their largest does."""

Results = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One error of one tensor beside what it may be."""

    tensor: str
    """``output 0``, ``gradient of x``, ..."""
    kind: str
    """``max`` or ``rms``."""
    error: float
    """Distance from the truth."""
    allowed: float
    """What the eager code's own distance allows."""
    numbers: int
    """How many it is the error of."""

    @property
    def ratio(self) -> float:
        """``error / allowed``: at most 1 passes; an exact result has 0."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf * self.error

    @property
    def passed(self) -> bool:
        """Whether the error is within the budget; false for NaN."""
        return self.error <= self.allowed


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All figures of one run, and what is wrong with it in words."""

    figures: list[Figure] = field(default_factory=list)
    """Two for every floating-point tensor that has elements."""
    problems: list[str] = field(default_factory=list)
    """One line for every tensor that fails; empty for a run that passes."""

    @property
    def may_be_luck(self) -> bool:
        """Whether more draws can decide: maxima or few numbers are over, and nothing else wrong."""
        over = [figure for figure in self.figures if not figure.passed]
        tensors = {figure.tensor for figure in over}
        return 0 < len(tensors) == len(self.problems) and all(
            figure.kind == "max" or figure.numbers < FEW for figure in over
        )


def compare(
    actual: Results, eager: Results, truth: Results, dtype: torch.dtype | None
) -> Comparison:
    """Hold ``actual`` to the budget that ``eager`` sets against ``truth``.

    ``dtype`` gives the rounding unit; None: each tensor's own dtype does.
    """
    found = Comparison(problems=_unlike(actual, eager, truth))
    if found.problems:
        return found
    for name in truth:
        problem = _compare(found, name, actual[name], eager[name], truth[name], dtype)
        if problem:
            found.problems.append(f"{name}: {problem}")
    return found


def compare_draws(
    actual: Sequence[Results],
    eager: Sequence[Results],
    truth: Sequence[Results],
    dtype: torch.dtype | None,
    together: int | None = None,
) -> Comparison:
    """``compare`` for several draws judged as one; names, shapes and dtypes for each of them.

    ``together``: so many draws in a row share a scale (None: all), and the others are brought to at
    most that of the first ones: a draw of larger numbers would set the budget of the rest, and one
    unlucky rounding in it would be over the errors of all of them.
    """
    for runs in zip(actual, eager, truth, strict=True):
        found = Comparison(problems=_unlike(*runs))
        if found.problems:
            return found
    shifts = _shifts(truth, together or len(truth))
    ours, theirs, exact = (pooled(_scaled(runs, shifts)) for runs in (actual, eager, truth))
    return compare(ours, theirs, exact, dtype)


def decide(
    run: Callable[[int], tuple[Results, Results, Results]], pool: int, dtype: torch.dtype | None
) -> tuple[Comparison, int]:
    """``compare_draws`` of as many draws as tell luck from a fault, and how many those were.

    ``run`` takes the number of a draw and gives its actual results, the eager ones and the truth.
    At first ``pool`` draws are judged as one.
    """
    runs: list[tuple[Results, Results, Results]] = []
    found = Comparison()
    for times in DRAWN:
        runs += [run(draw) for draw in range(len(runs), times * pool)]
        actual, eager, truth = zip(*runs, strict=True)
        found = compare_draws(actual, eager, truth, dtype, pool)
        if not found.may_be_luck:
            break
    return found, len(runs)


def results(
    function: Callable[..., Any],
    inputs: Results,
    dtype: torch.dtype,
    run_in: torch.dtype | None = None,
    wanted: Collection[str] | None = None,
    draw: int = 0,
) -> Results:
    """Outputs of ``function`` and the gradient of each floating-point input.

    ``function`` returns a tensor, a tuple or a mapping of them; integer outputs have no gradient.
    ``dtype`` is the one the random upstream gradients are rounded to, whatever the outputs are, so
    that runs in several dtypes get the same ones; ``run_in`` casts the inputs; ``wanted`` names the
    inputs whose gradient is asked for (None: all); each ``draw`` has other upstream gradients.
    Raises AssertionError where an input has none.
    """
    leaves = make_leaves(inputs, run_in, wanted)
    outputs = named_outputs(function(**leaves))
    return with_gradients(outputs, leaves, upstream(outputs, dtype, draw))


def make_leaves(
    inputs: Results, run_in: torch.dtype | None = None, wanted: Collection[str] | None = None
) -> Results:
    """``inputs``, cast, as leaves that ask for gradients; their memory layout is kept."""
    leaves = {}
    for name, tensor in inputs.items():
        leaf = cast(tensor.detach(), run_in or tensor.dtype)
        asks = leaf.is_floating_point() and (wanted is None or name in wanted)
        leaves[name] = leaf.requires_grad_() if asks else leaf
    return leaves


def named_outputs(returned: Any) -> Results:
    """What a function returned, as tensors with names."""
    if isinstance(returned, Mapping):
        return dict(returned)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return {f"output {i}": out for i, out in enumerate(outputs)}


def upstream(outputs: Results, dtype: torch.dtype, draw: int = 0) -> list[torch.Tensor]:
    """Random gradients of the floating-point outputs: the same numbers on every device.

    Other ones for each ``draw``: a bias has no more of an input in its gradient than these.
    """
    generator = torch.Generator("cpu").manual_seed(1 + draw)
    return [
        torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cpu")
        .to(dtype)
        .to(out)
        for out in outputs.values()
        if out.is_floating_point()
    ]


def with_gradients(outputs: Results, leaves: Results, grads: list[torch.Tensor]) -> Results:
    """``outputs`` and the gradient of every leaf that asks for one."""
    named = {name: out.detach() for name, out in outputs.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not wanted:
        return named
    floats = [out for out in outputs.values() if out.is_floating_point()]
    found = torch.autograd.grad(floats, list(wanted.values()), grads, allow_unused=True)
    for name, grad in zip(wanted, found, strict=True):
        assert grad is not None, f"{name} has no gradient"
        named[f"gradient of {name}"] = grad
    return named


def pooled(runs: Sequence[Results]) -> Results:
    """Results of several draws as one: the error of a few numbers is luck."""
    if len(runs) == 1:
        return runs[0]
    return {name: torch.cat([run[name].flatten() for run in runs]) for name in runs[0]}


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype`` if it holds floating-point numbers, else unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same shape, dtype and bits: NaN equals itself, -0 does not equal 0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def _unlike(actual: Results, eager: Results, truth: Results) -> list[str]:
    """What is wrong with names, shapes and dtypes."""
    if not actual.keys() == eager.keys() == truth.keys():
        return [f"returned {sorted(actual)}, expected {sorted(truth)}"]
    return [
        f"{name}: {actual[name].shape} {actual[name].dtype}, "
        f"expected {truth[name].shape} {eager[name].dtype}"
        for name in truth
        if actual[name].shape != truth[name].shape or actual[name].dtype != eager[name].dtype
    ]


def _shifts(truth: Sequence[Results], together: int) -> list[dict[str, float]]:
    """For every draw the powers of two, which round nothing, that bring it up or down to the first.

    To more than half and at most all of the size of the first ones.
    """
    shifts: list[dict[str, float]] = []
    first: dict[str, float] = {}
    for start in range(0, len(truth), together):
        pool = truth[start : start + together]
        sizes = {n: max(_largest(r[n]) for r in pool) for n, t in pool[0].items() if _counts(t)}
        first = sizes if not start else first
        usable = {n: s for n, s in sizes.items() if 0 < s < math.inf and 0 < first[n] < math.inf}
        shift = {n: 2.0 ** math.floor(math.log2(first[n] / s)) for n, s in usable.items()}
        shifts += [shift] * len(pool)
    return shifts


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _scaled(runs: Sequence[Results], shifts: list[dict[str, float]]) -> list[Results]:
    pairs = zip(runs, shifts, strict=True)
    return [{n: t * s[n] if s.get(n, 1) != 1 else t for n, t in r.items()} for r, s in pairs]


def _compare(
    found: Comparison,
    name: str,
    actual: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    dtype: torch.dtype | None,
) -> str | None:
    if not truth.numel():
        return None
    if not truth.is_floating_point():
        differ = int((actual != truth).sum())
        return f"{differ} of {truth.numel()} differ from the truth" if differ else None
    unit = torch.finfo(dtype or actual.dtype).eps / 2
    problem = None
    for kind, size in (("max", _largest), ("rms", _rms)):
        allowed = FACTOR * size(eager - truth) + unit * size(truth)
        error = size(actual - truth)
        figure = Figure(tensor=name, kind=kind, error=error, allowed=allowed, numbers=truth.numel())
        found.figures.append(figure)
        if problem is None and not figure.passed:
            problem = f"{kind} error {figure.error:.3e}, allowed {figure.allowed:.3e}"
    return problem


def _largest(tensor: torch.Tensor) -> float:
    return tensor.double().abs().max().item()


def _rms(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
