"""Rotary embedding alone, and behind the norm of queries and keys from one fused projection.

Heads have 128 features where that divides the width; queries share a key head by fours or the
nearest number that divides.
"""

from collections.abc import Callable
from typing import Any

import torch

from slipstream import ops
from slipstream.bench.ops_case import Draw, Floor, Function, OpCase, OpShape
from slipstream.bench.ops_norms import EPS, rms_norm_plainly
from slipstream.bench.ops_peers import liger, usual
from slipstream.verify.budget import Results

HEAD_WIDTHS = (128, 120, 96, 64, 32, 16, 8, 4, 2)
GROUP = 4
TABLE = 4
"""Bytes of an entry of the tables, fp32."""


def heads_of(width: int) -> tuple[int, int, int]:
    """Query heads H, key heads G and features C of a model of this width."""
    features = next(c for c in HEAD_WIDTHS if width % c == 0)
    heads = width // features
    return heads, max(g for g in range(1, max(1, heads // GROUP) + 1) if heads % g == 0), features


def rope_case(shape: OpShape, size: int) -> OpCase:
    """q and k in, q and k out: twice their bytes, and the tables, each way."""
    heads, groups, features = heads_of(shape.width)
    batch, length = shape.tokens // shape.sequence, shape.sequence

    def inputs(draw: Draw) -> Results:
        return {
            "q": draw.normal(batch, length, heads, features),
            "k": draw.normal(batch, length, groups, features),
            **_tables(length, features, draw),
        }

    def plain(q: torch.Tensor, k: torch.Tensor, cos_full: Any, sin_full: Any, **_: Any) -> tuple:
        return _turn(q, cos_full, sin_full), _turn(k, cos_full, sin_full)

    def truth(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, **_: Any) -> tuple:
        return plain(q, k, _full(cos), _full(sin))

    moved = 2 * shape.tokens * (heads + groups) * features * size
    moved += 2 * TABLE * length * (features // 2)
    return OpCase(
        op="rope",
        sizes=_sizes(shape),
        inputs=inputs,
        plain=plain,
        truth=truth,
        peers=usual(
            lambda q, k, cos, sin, **_: ops.rope(q, k, cos, sin), plain, liger=_make_liger_rope
        ),
        floor=Floor(forward_bytes=moved, backward_bytes=moved),
        wanted=frozenset({"q", "k"}),
    )


def rope_qk_norm_case(shape: OpShape, size: int) -> OpCase:
    """From one fused projection: RMSNorm per head of q and k, rotation; v passes.

    The backward reads dq, dk, dv and q and k from before the norm, and writes the gradient of the
    projection: 3H + 5G heads of features.
    """
    heads, groups, features = heads_of(shape.width)
    batch, length = shape.tokens // shape.sequence, shape.sequence

    def inputs(draw: Draw) -> Results:
        return {
            "qkv": draw.normal(batch, length, (heads + 2 * groups) * features),
            "q_weight": draw.normal(features, std=0.1).add_(1),
            "k_weight": draw.normal(features, std=0.1).add_(1),
            **_tables(length, features, draw),
        }

    peers = _peers_of_fused(heads, groups, features)
    row = shape.tokens * features * size
    tables = 2 * TABLE * length * (features // 2)
    return OpCase(
        op="rope-qk-norm",
        sizes=_sizes(shape),
        inputs=inputs,
        plain=peers["eager"](),
        truth=_truth_of_fused(heads, groups, features),
        peers=peers,
        floor=Floor(
            forward_bytes=2 * (heads + groups) * row + tables,
            backward_bytes=(3 * heads + 5 * groups) * row + tables,
        ),
        wanted=frozenset({"qkv", "q_weight", "k_weight"}),
    )


def _peers_of_fused(heads: int, groups: int, features: int) -> dict[str, Callable[[], Function]]:
    def plain(
        qkv: Any, q_weight: Any, k_weight: Any, cos_full: Any, sin_full: Any, **_: Any
    ) -> tuple:
        q, k, v = _split(qkv, heads, groups, features)
        q, k = rms_norm_plainly(q, q_weight), rms_norm_plainly(k, k_weight)
        return _turn(q, cos_full, sin_full), _turn(k, cos_full, sin_full), v

    def ours(qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, **_: Any) -> tuple:
        return ops.qkv_rope(
            qkv,
            cos,
            sin,
            heads=heads,
            kv_heads=groups,
            q_weight_C=q_weight,
            k_weight_C=k_weight,
            eps=EPS,
            cast="llama",
        )

    def make_liger() -> Function:
        norm, turn = liger("liger_rms_norm"), _make_liger_rope()

        def run(qkv: Any, q_weight: Any, k_weight: Any, **tables: Any) -> tuple:
            q, k, v = _split(qkv, heads, groups, features)
            return (*turn(norm(q, q_weight, EPS), norm(k, k_weight, EPS), **tables), v)

        return run

    return usual(ours, plain, liger=make_liger)


def _truth_of_fused(heads: int, groups: int, features: int) -> Function:
    plain = _peers_of_fused(heads, groups, features)["eager"]()

    def truth(cos: Any, sin: Any, cos_full: Any, sin_full: Any, **t: Any) -> tuple:
        return plain(**t, cos_full=_full(cos), sin_full=_full(sin))

    return truth


def _split(
    qkv: torch.Tensor, heads: int, groups: int, features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.unflatten(-1, (-1, features)).split([heads, groups, groups], dim=2)
    return q, k, v


def _sizes(shape: OpShape) -> dict[str, int]:
    heads, groups, features = heads_of(shape.width)
    return {"T": shape.tokens, "H": heads, "G": groups, "C": features}


def _tables(length: int, features: int, draw: Draw) -> Results:
    device = draw.generator.device
    cos, sin = ops.rope_tables(ops.RopeSpec(head_dim=features), length, device)
    full = {"cos_full": _full(cos), "sin_full": _full(sin)}
    # Other stacks keep the tables in the dtype of the model, both halves written out.
    return {"cos": cos, "sin": sin} | {name: table.to(draw.dtype) for name, table in full.items()}


def _full(table_LR: torch.Tensor) -> torch.Tensor:
    return torch.cat((table_LR, table_LR), dim=-1)


def _turn(x: torch.Tensor, cos_LC: torch.Tensor, sin_LC: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_LC[:, None] + torch.cat((-second, first), dim=-1) * sin_LC[:, None]


def _make_liger_rope() -> Function:
    function = liger("liger_rope")

    def run(q: Any, k: Any, cos_full: Any, sin_full: Any, **_: Any) -> tuple:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k))
        turned = function(*heads_first, cos_full[None], sin_full[None])
        return tuple(tensor.transpose(1, 2) for tensor in turned)

    return run
