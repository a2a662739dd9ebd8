"""The norm of all gradients, against that of all elements in one vector."""

from typing import Any

import torch

from slipstream.ops import grad_norm
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Promise, Scale, Suite


def _draw(*sizes: tuple[int, ...]) -> Any:
    def draw(generator: torch.Generator) -> Results:
        return {f"grad{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)}

    return draw


def _eager(**t: torch.Tensor) -> torch.Tensor:
    wide = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in t.values()]
    return torch.cat([grad.flatten() for grad in wide]).norm()


def _case(name: str, *sizes: tuple[int, ...]) -> Case:
    return Case(
        name=name,
        inputs=_draw(*sizes),
        call=lambda **t: grad_norm(list(t.values())),
        eager=_eager,
        wanted=frozenset(),
        # One number: its error is luck, so several are judged together.
        pool=64,
        own_units=True,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("63x257-1", (63, 257), (1,)),
        _case("1", (1,)),
        _case("with-an-empty-one", (0, 8), (257,)),
    ]
    if scale == "large":
        found.append(_case("1025x2048", (1025, 2048)))
    return found


def _bad_elements_show(device: torch.device, dtype: torch.dtype) -> str | None:
    for bad in (float("nan"), float("inf")):
        grad = torch.ones(63, 257, device=device, dtype=dtype)
        grad[62, 256] = bad
        norm = grad_norm([torch.ones(5, device=device, dtype=dtype), grad])
        if torch.isfinite(norm):
            return f"{bad} gives {norm.item()}"
    return None


SUITE = Suite(
    op="grad_norm",
    cases=_cases,
    promises=(Promise(name="a bad element shows", holds=_bad_elements_show),),
    exempt={("triton", "compile"): "the compiler fuses its own sums"},
)
