"""Error budgets: how far an implementation may be from the truth, which is its fp64 reference.

An implementation passes when its error is at most 1.5 times the error of the same-dtype eager code
plus one rounding unit of the dtype at the magnitude of the truth: for the maximum and for the root
mean square of the error, for every output and every gradient. NaN never passes.
"""

from collections.abc import Callable
from typing import Any

import torch

FACTOR = 1.5

Results = dict[str, torch.Tensor]


def assert_budget(
    function: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Results,
    dtype: torch.dtype,
    truth: Callable[..., Any] | None = None,
) -> None:
    """Hold ``function`` to the budget of ``eager`` in ``dtype``; ``truth`` (or eager) gives fp64.

    All take the tensors of ``inputs`` by name and return one tensor or several.
    """
    inputs = {name: _cast(tensor, dtype) for name, tensor in inputs.items()}
    assert_within(
        results(function, inputs, dtype),
        results(eager, inputs, dtype),
        results(truth or eager, inputs, dtype, run_in=torch.float64),
        dtype,
    )


def assert_within(actual: Results, eager: Results, truth: Results, dtype: torch.dtype) -> None:
    """Hold every tensor of ``actual`` to the budget that ``eager`` sets against ``truth``."""
    assert actual.keys() == eager.keys() == truth.keys()
    failures = [
        f"{name}: {failure}"
        for name in truth
        if (failure := _excess(actual[name], eager[name], truth[name], dtype))
    ]
    assert not failures, "\n".join(failures)


def results(
    function: Callable[..., Any],
    inputs: Results,
    dtype: torch.dtype,
    run_in: torch.dtype | None = None,
) -> Results:
    """Outputs of ``function`` and the gradient of each floating-point input.

    ``dtype`` is the one the random upstream gradients are rounded to, whatever the outputs are, so
    that runs in several dtypes get the same ones; ``run_in`` casts the inputs.
    """
    leaves = {
        name: _cast(tensor.detach(), run_in or tensor.dtype) for name, tensor in inputs.items()
    }
    wanted = {name: t.requires_grad_() for name, t in leaves.items() if t.is_floating_point()}
    returned = function(**leaves)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    generator = torch.Generator("cpu").manual_seed(1)
    upstream = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cpu")
        .to(dtype)
        .to(out)
        for out in outputs
    ]
    grads = torch.autograd.grad(outputs, list(wanted.values()), upstream, allow_unused=True)
    named = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    for name, grad in zip(wanted, grads, strict=True):
        assert grad is not None, f"{name} has no gradient"
        named[f"gradient of {name}"] = grad
    return named


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _excess(
    actual: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype
) -> str | None:
    if actual.shape != truth.shape or actual.dtype != eager.dtype:
        return f"{actual.shape} {actual.dtype}, expected {truth.shape} {eager.dtype}"
    if not truth.numel():
        return None
    unit = torch.finfo(dtype).eps / 2
    for kind, size in (("max", _largest), ("rms", _rms)):
        error, allowed = size(actual - truth), FACTOR * size(eager - truth) + unit * size(truth)
        if not error <= allowed:
            return f"{kind} error {error:.3e}, allowed {allowed:.3e}"
    return None


def _largest(tensor: torch.Tensor) -> float:
    return tensor.double().abs().max().item()


def _rms(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
