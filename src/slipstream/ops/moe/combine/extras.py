"""What combine adds to the rows: residual and shared expert."""

import torch


def distinct(main: torch.Tensor, *extras: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """``extras``, as views where one is ``main`` or another of them.

    The compiler cannot pass one tensor twice to an ``autograd.Function``; the residual may well be
    the layer's input. Eager code can, and views would let gradients share memory there.
    """
    if not torch.compiler.is_compiling():
        return extras
    seen, out = [main], []
    for extra in extras:
        if extra is not None and any(extra is other for other in seen):
            extra = extra.view_as(extra)
        if extra is not None:
            seen.append(extra)
        out.append(extra)
    return tuple(out)
