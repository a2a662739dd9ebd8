"""Weight gradients added to fp32 buffers instead of handed to autograd."""

from collections.abc import Callable
from typing import Any

import torch

from slipstream.errors import ConfigError, ShapeError
from slipstream.ops import check
from slipstream.ops.add_to import AddTo

Accumulate = tuple[torch.Tensor, torch.Tensor]
"""Where the gradients of w13 and w2 are added: fp32, shaped like them."""


def check_accumulate(
    op: str, w13_EPD: torch.Tensor, w2_EDF: torch.Tensor, accumulate: Accumulate | None
) -> None:
    """Raise unless the buffers fit the weights and the code runs eagerly."""
    if accumulate is None:
        return
    if torch.compiler.is_compiling():
        # A graph would not see the buffers change.
        raise ConfigError(
            f"{op}: accumulate works in eager code only; leave it out of torch.compile"
        )
    if not isinstance(accumulate, tuple | list) or len(accumulate) != 2:
        raise ShapeError(
            f"{op}: accumulate is {check.described(accumulate)}, expected two buffers, "
            f"for w13 and for w2"
        )
    for name, buffer, weight in zip(("w13", "w2"), accumulate, (w13_EPD, w2_EDF), strict=True):
        check.shape(op, f"accumulate for {name}", buffer, *weight.shape)
        check.same_device(op, **{name: weight, f"accumulate for {name}": buffer})
        if not (buffer.is_contiguous() or buffer.mT.is_contiguous()):
            raise ShapeError(
                f"{op}: accumulate for {name} has strides {buffer.stride()}, expected it, or its "
                f"transpose .mT, to be contiguous"
            )
        if buffer.dtype != torch.float32 or buffer.requires_grad:
            raise ShapeError(
                f"{op}: accumulate for {name} is {buffer.dtype}, requires_grad = "
                f"{buffer.requires_grad}; expected a plain torch.float32 buffer"
            )


def adding(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``run(x, w13, w2, ...)`` with a last argument ``accumulate``, for code that has none."""

    def wrapped(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *args: Any,
        accumulate: Accumulate | None = None,
    ) -> torch.Tensor:
        if accumulate is not None:
            w13, w2 = AddTo.apply(w13, accumulate[0]), AddTo.apply(w2, accumulate[1])
        return run(x, w13, w2, *args)

    return wrapped
