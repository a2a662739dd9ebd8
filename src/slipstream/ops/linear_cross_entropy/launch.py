"""Runs the op chunk by chunk: a product into a slab, one kernel over its rows, two products out.

A slab of logits lives for one call; the weight gradient is accumulated in fp32 by the product
itself. Nothing here asks the device for a number.
"""

from collections.abc import Callable, Iterator

import torch

from slipstream.ops.linear_cross_entropy import kernels, tuned
from slipstream.ops.linear_cross_entropy.chunks import Head, row_stride, rows_for
from slipstream.ops.linear_cross_entropy.options import LossOptions, Sums
from slipstream.ops.triton_support import cdiv


def forward_launch(
    x_TD: torch.Tensor, w_VD: torch.Tensor, targets_T: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (0 where ignored) and logsumexp of every token, fp32, and what backward reads.

    That is ``(2, T)``: the highest capped logit and the sum of exponentials of distances from it.
    """
    loss_T, lse_T = _per_token(x_TD), _per_token(x_TD)
    softmax_2T = loss_T.new_empty(2, len(loss_T))
    highest_T, total_T = softmax_2T

    def over_rows(slab: torch.Tensor, at: slice) -> None:
        kernels.linear_cross_entropy_fwd_kernel[(len(slab),)](
            slab,
            targets_T[at],
            loss_T[at],
            lse_T[at],
            highest_T[at],
            total_T[at],
            *_scalars(options),
            **_blocks(tuned.STATS, slab, options),
        )

    _run(x_TD, w_VD, over_rows, None, None)
    return loss_T, lse_T, softmax_2T


def gradients_launch(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    options: LossOptions,
    need_x: bool,
    need_w: bool,
) -> tuple[Sums, torch.Tensor, torch.Tensor]:
    """The sums and the gradients of the objective.

    Those of x in its dtype and of w in fp32; what is not needed is empty.
    """
    loss_T, lse_T = _per_token(x_TD), _per_token(x_TD)
    dx_TD, dw_VD = _gradients(x_TD, w_VD, need_x, need_w)

    def over_rows(slab: torch.Tensor, at: slice) -> None:
        kernels.linear_cross_entropy_grad_kernel[(len(slab),)](
            slab,
            targets_T[at],
            loss_T[at],
            lse_T[at],
            *_scalars(options),
            options.z_loss,
            **_blocks(tuned.STATS, slab, options),
        )

    _run(x_TD, w_VD, over_rows, dx_TD if need_x else None, dw_VD if need_w else None)
    return sums_launch(loss_T, lse_T, targets_T, options), dx_TD, dw_VD


def backward_launch(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    softmax_2T: torch.Tensor,
    dloss_T: torch.Tensor,
    dlse_T: torch.Tensor,
    options: LossOptions,
    need_x: bool,
    need_w: bool,
    accumulate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x in its dtype and of w in fp32, the logits computed again.

    ``accumulate``: an fp32 buffer to add the gradient of w to instead; it is then returned.
    """
    dx_TD, dw_VD = _gradients(x_TD, w_VD, need_x, need_w and accumulate is None)
    dw_VD = dw_VD if accumulate is None else accumulate
    highest_T, total_T = softmax_2T

    def over_rows(slab: torch.Tensor, at: slice) -> None:
        kernels.linear_cross_entropy_bwd_kernel[(len(slab),)](
            slab,
            targets_T[at],
            highest_T[at],
            total_T[at],
            dloss_T[at],
            dlse_T[at],
            *_scalars(options),
            **_blocks(tuned.POINTWISE, slab, options),
        )

    wanted = dw_VD if need_w else None
    _run(x_TD, w_VD, over_rows, dx_TD if need_x else None, wanted, add=accumulate is not None)
    return dx_TD, dw_VD


def sums_launch(
    loss_T: torch.Tensor, lse_T: torch.Tensor, targets_T: torch.Tensor, options: LossOptions
) -> Sums:
    """objective, nll, z and tokens in one launch."""
    objective, nll, z = (loss_T.new_empty(()) for _ in range(3))
    tokens = targets_T.new_empty(())
    kernels.linear_cross_entropy_sum_kernel[(1,)](
        loss_T,
        lse_T,
        targets_T,
        objective,
        nll,
        z,
        tokens,
        len(loss_T),
        options.ignore_index,
        options.z_loss,
        BLOCK=tuned.SUM_BLOCK,
        num_warps=tuned.SCALE_WARPS,
    )
    return objective, nll, z, tokens


def scale_launch(
    made: torch.Tensor, out: torch.Tensor, factor: torch.Tensor, *, add: bool = False
) -> torch.Tensor:
    """``out = factor * made``, or added to ``out``; ``made`` may be ``out``. Rounded once."""
    if made.numel():
        kernels.linear_cross_entropy_scale_kernel[(cdiv(made.numel(), tuned.SCALE_BLOCK),)](
            made,
            out,
            factor,
            made.numel(),
            ADD=add,
            IN_PLACE=made is out,
            BLOCK=tuned.SCALE_BLOCK,
            num_warps=tuned.SCALE_WARPS,
        )
    return out


def _per_token(x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)


def _gradients(
    x_TD: torch.Tensor, w_VD: torch.Tensor, need_x: bool, need_w: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dx_TD = x_TD.new_empty(x_TD.shape if need_x else (0,))
    return dx_TD, w_VD.new_empty(w_VD.shape if need_w else (0,), dtype=torch.float32)


def _scalars(options: LossOptions) -> tuple[int, float, float]:
    softcap = 1.0 if options.softcap is None else options.softcap
    return options.ignore_index, options.label_smoothing, float(softcap)


def _blocks(
    table: dict[int, tuned.Rows], slab: torch.Tensor, options: LossOptions
) -> dict[str, int | bool]:
    stride = slab.stride(0)
    rows = tuned.for_row(table, slab.element_size(), stride)
    return {
        "CAPPED": options.softcap is not None,
        "MEAN": options.label_smoothing > 0,
        "V": slab.shape[1],
        "STRIDE": stride,
        "BLOCK": rows.block,
        "STAGES": rows.stages,
        "num_warps": rows.num_warps,
    }


def _run(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    over_rows: Callable[[torch.Tensor, slice], None],
    dx_TD: torch.Tensor | None,
    dw_VD: torch.Tensor | None,
    add: bool = False,
) -> None:
    """Logits of a chunk into the slab, ``over_rows``, and the gradients that are wanted."""
    if not len(x_TD):
        if dw_VD is not None and not add:
            dw_VD.zero_()
        return
    x_TD, w = _dense(x_TD), _dense(w_VD.to(x_TD.dtype))
    for slab, at in _chunks(x_TD, w, dx_TD is not None, dw_VD is not None):
        x = x_TD[at]
        torch.mm(x, w.mT, out=slab)
        over_rows(slab, at)
        if dx_TD is not None:
            torch.mm(slab, w, out=dx_TD[at])
        if dw_VD is not None:
            _weight_gradient(slab, x, dw_VD, add or at.start > 0)


def _chunks(
    x_TD: torch.Tensor, w_VD: torch.Tensor, x_grad: bool, w_grad: bool
) -> Iterator[tuple[torch.Tensor, slice]]:
    tokens, (vocab, width) = len(x_TD), w_VD.shape
    head = Head(
        tokens=tokens,
        width=width,
        vocab=vocab,
        itemsize=x_TD.element_size(),
        x_grad=x_grad,
        w_grad=w_grad,
    )
    rows = rows_for(head, x_TD.device)
    slab = x_TD.new_empty(rows, row_stride(vocab))[:, :vocab]
    for start in range(0, tokens, rows):
        at = slice(start, min(start + rows, tokens))
        yield slab[: at.stop - start], at


def _weight_gradient(
    dlogits: torch.Tensor, x: torch.Tensor, dw_VD: torch.Tensor, add: bool
) -> None:
    """``dw (+)= dlogits^T @ x``, accumulated and stored in fp32."""
    left = dlogits.mT
    if x.is_cuda and add:
        torch.addmm(dw_VD, left, x, out_dtype=torch.float32, out=dw_VD)
    elif x.is_cuda:
        torch.mm(left, x, out_dtype=torch.float32, out=dw_VD)
    elif add:
        # Only CUDA widens in the product; products of 16-bit numbers are exact in fp32.
        torch.addmm(dw_VD, left.float(), x.float(), out=dw_VD)
    else:
        torch.mm(left.float(), x.float(), out=dw_VD)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` as cuBLAS reads it without a copy per product."""
    dense = matrix.is_contiguous() or matrix.mT.is_contiguous()
    return matrix if dense else matrix.contiguous()
