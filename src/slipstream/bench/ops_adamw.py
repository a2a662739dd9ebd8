"""One AdamW step over 32 tensors, in the three ways of keeping weights.

Ours and the compiled code take them as one flat bucket, as ``FlatAdamW`` keeps weights; PyTorch's
fused kernel takes a list of 32, as its optimizer does.
``master``: 16-bit weights and gradients, fp32 masters and moments. ``fp32``: all fp32. ``bf16``:
weights, gradients and moments in 16 bits, as a model that is trained in pure bf16 has them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from slipstream import ops
from slipstream.bench.ops_case import Draw, Floor, OpCase, OpShape
from slipstream.bench.ops_peers import usual
from slipstream.verify.budget import Results

TENSORS = 32
STEPS_BEFORE = 10
OPTIONS = ops.AdamWOptions(lr=1e-3, weight_decay=0.1)


def master_case(shape: OpShape, size: int) -> OpCase:
    """14 bytes read and 14 written per weight for a 16-bit weight: 28."""
    return _case(shape, "adamw-master", size=size, wide=True, masters=True)


def fp32_case(shape: OpShape, size: int) -> OpCase:
    """16 bytes read and 12 written per weight: 28."""
    return _case(shape, "adamw-fp32", size=4, wide=True, masters=False)


def bf16_case(shape: OpShape, size: int) -> OpCase:
    """8 bytes read and 6 written per weight: 14."""
    return _case(shape, "adamw-bf16", size=size, wide=False, masters=False)


def _case(shape: OpShape, op: str, *, size: int, wide: bool, masters: bool) -> OpCase:
    rows = max(1, shape.tokens // 4)
    weights = TENSORS * rows * shape.width
    kept = 4 if wide else size
    # A gradient is read; weight and moments are read and written; a master's weight is written.
    moved = size + 2 * 3 * kept + (size if masters else 0)

    def inputs(draw: Draw) -> Results:
        dtype = torch.float32 if wide else draw.dtype
        sizes = (TENSORS, rows, shape.width)
        weight = draw.normal(*sizes, std=0.02, dtype=dtype)
        low = draw.dtype if masters else dtype
        drawn = {
            "param": weight.to(low, copy=True),
            "grad": draw.normal(*sizes, std=1e-3, dtype=low),
            "exp_avg": draw.normal(*sizes, std=1e-4, dtype=dtype),
            "exp_avg_sq": draw.normal(*sizes, std=1e-3, dtype=dtype).square_(),
            "step": torch.full((TENSORS,), float(STEPS_BEFORE), device=weight.device),
        }
        return drawn | ({"master": weight} if masters else {})

    # 16-bit weights without masters have to say how they round; this is what the peers do.
    options = OPTIONS if wide else replace(OPTIONS, rounding="nearest")
    changes = ("param", "exp_avg", "exp_avg_sq", "step", *(["master"] if masters else []))
    return OpCase(
        op=op,
        sizes={"N": TENSORS, "P": weights},
        inputs=inputs,
        plain=_plain,
        peers=usual(lambda **t: _ours(options, t), _plain, torch=lambda: _fused),
        floor=Floor(forward_bytes=moved * weights),
        changes=changes,
        own_units=True,
    )


def _ours(options: ops.AdamWOptions, t: Results) -> None:
    ops.adamw(
        [t["param"]],
        [t["grad"]],
        [t["exp_avg"]],
        [t["exp_avg_sq"]],
        [t["step"][0]],
        masters=[t["master"]] if "master" in t else None,
        options=options,
    )
    t["step"][1:] = t["step"][0]


@torch.no_grad()
def _plain(**t: torch.Tensor) -> None:
    # All tensors as one: the compiler then has a single pass to make.
    weight, m, v = t.get("master", t["param"]), t["exp_avg"], t["exp_avg_sq"]
    grad = t["grad"].to(weight.dtype)
    t["step"].add_(1)
    step = t["step"][0]
    m.lerp_(grad, 1 - OPTIONS.beta1)
    v.mul_(OPTIONS.beta2).addcmul_(grad, grad, value=1 - OPTIONS.beta2)
    m_hat, v_hat = m / (1 - OPTIONS.beta1**step), v / (1 - OPTIONS.beta2**step)
    weight.mul_(1 - OPTIONS.lr * OPTIONS.weight_decay)
    weight.sub_(OPTIONS.lr * m_hat / (v_hat.sqrt() + OPTIONS.eps))
    if "master" in t:
        t["param"].copy_(weight)


@torch.no_grad()
def _fused(**t: torch.Tensor) -> None:
    weights = list(t.get("master", t["param"]).unbind())
    grads: list[Any] = [g.to(weights[0].dtype) for g in t["grad"].unbind()]
    torch_adamw(
        weights,
        grads,
        list(t["exp_avg"].unbind()),
        list(t["exp_avg_sq"].unbind()),
        [],
        list(t["step"].unbind()),
        fused=True,
        amsgrad=False,
        beta1=OPTIONS.beta1,
        beta2=OPTIONS.beta2,
        lr=OPTIONS.lr,
        weight_decay=OPTIONS.weight_decay,
        eps=OPTIONS.eps,
        maximize=False,
    )
    if "master" in t:
        t["param"].copy_(t["master"])
