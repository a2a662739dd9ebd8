"""``qkv_rope`` and ``qk_norm_rope``: the norm of the heads and the rotation in one pass."""

import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from slipstream.errors import ShapeError
from slipstream.ops import RopeSpec, norm, qk_norm_rope, qkv_rope, rope, rope_tables
from slipstream.verify.cases.qk_norm_rope import eager_qk_norm_rope
from slipstream.verify.cases.rope import eager_rope
from tests.budget import Results, assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import ONE, cases, fast, forced, runnable

HEADS, KV_HEADS = 3, 2
COLUMNS = HEADS + 2 * KV_HEADS
SIZES = {"whole": (16, 16), "part": (24, 16), "odd": (33, 10), "one-pair": (8, 2)}
"""Features of a head, and how many turn."""
OPS = ("qkv_rope", "qk_norm_rope")


def _tables(length: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(RopeSpec(head_dim=rotated), length)


def _qkv(batch: int, length: int, width: int, *, norm: bool = True) -> Results:
    inputs = {"qkv": torch.randn(batch, length, COLUMNS * width)}
    return inputs | (_weights(width) if norm else {})


def _weights(width: int) -> Results:
    names = ("q_weight_C", "k_weight_C")
    return {name: 1 + 0.3 * torch.randn(width) for name in names}


def _split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = qkv.unflatten(-1, (COLUMNS, qkv.shape[-1] // COLUMNS))
    return rows.split([HEADS, KV_HEADS, KV_HEADS], dim=2)


def _run(name: str, tables: tuple[torch.Tensor, torch.Tensor], **options):
    def run(qkv, **weights):
        with forced("qkv_rope", name):
            return qkv_rope(qkv, *tables, **weights, heads=HEADS, kv_heads=KV_HEADS, **options)

    return run


def _stock(tables: tuple[torch.Tensor, torch.Tensor]):
    def run(qkv, **weights):
        q, k, v = _split(qkv)
        return *(eager_qk_norm_rope if weights else eager_rope)(q, k, *tables, **weights), v

    return run


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(("implementation", "dtype"), cases("qkv_rope"))
def test_qkv_rope_stays_in_budget(implementation, dtype, normed, sizes, poisoned):
    width, rotated = SIZES[sizes]
    tables = _tables(31, rotated)
    inputs = _qkv(2, 31, width, norm=normed)
    assert_budget(_run(implementation, tables, cast="fp32"), _stock(tables), inputs, dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cast", ["llama", "fp32"])
@pytest.mark.parametrize(("implementation", "dtype"), cases("qk_norm_rope", interpreted=ONE))
def test_qk_norm_rope_stays_in_budget(implementation, dtype, cast, sizes, poisoned):
    width, rotated = SIZES[sizes]
    tables = _tables(31, rotated)
    inputs = {
        "q": torch.randn(2, 31, HEADS, width),
        "k": torch.randn(2, 31, KV_HEADS, width),
        **_weights(width),
    }

    def run(q, k, **weights):
        with forced("qk_norm_rope", implementation):
            return qk_norm_rope(q, k, *tables, **weights, cast=cast)

    def stock(q, k, **weights):
        if cast == "fp32":
            return eager_qk_norm_rope(q, k, *tables, **weights)
        pairs = ((q, weights["q_weight_C"]), (k, weights["k_weight_C"]))
        return eager_rope(*(_qwen3_norm(x, weight) for x, weight in pairs), *tables)

    assert_budget(run, stock, inputs, dtype)


def _qwen3_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    module = Qwen3RMSNorm(len(weight), eps=1e-6)
    del module.weight
    module.weight = weight  # a plain tensor: its gradient is asked for like any other
    return module(x)


@pytest.mark.parametrize("cast", ["llama", "fp32"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", runnable("qkv_rope"))
def test_rounds_like_the_ops_it_fuses(implementation, dtype, offset, cast):
    tables, inputs = _tables(9, 16), {n: t.to(dtype) for n, t in _qkv(1, 9, 16).items()}
    if implementation == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds bf16 wrongly")
    q, k, v = _run(implementation, tables, cast=cast, offset=offset)(**inputs)
    heads = _split(inputs["qkv"])
    with forced("norm", "reference"), forced("rope", "reference"):
        normed = [
            norm(x, inputs[name], cast=cast, offset=offset)[0]
            for x, name in zip(heads, ("q_weight_C", "k_weight_C"), strict=False)
        ]
        expected = rope(*normed, *tables)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, heads[2])


@pytest.mark.parametrize("implementation", runnable("qk_norm_rope"))
def test_matches_the_attention_of_qwen3(implementation):
    config = Qwen3Config(head_dim=16, hidden_size=48, num_attention_heads=3)
    q, k = torch.randn(2, 9, 3, 16), torch.randn(2, 9, 1, 16)
    weights = _weights(16)
    cos, sin = _tables(9, config.head_dim)
    with forced("qk_norm_rope", implementation):
        actual = qk_norm_rope(q, k, cos, sin, **weights, eps=config.rms_norm_eps)
    normed = (
        _qwen3_norm(x, w).transpose(1, 2) for x, w in zip((q, k), weights.values(), strict=True)
    )
    tables = (torch.cat((t, t), dim=-1)[None] for t in (cos, sin))
    expected = tuple(t.transpose(1, 2) for t in apply_rotary_pos_emb(*normed, *tables))
    assert_close(actual, expected)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_the_reference_in_fp64(op):
    tables = _tables(3, 4)
    inputs = {n: t.double().requires_grad_() for n, t in _qkv(1, 3, 6).items()}

    def run(qkv, q_weight_C, k_weight_C):
        weights = {"q_weight_C": q_weight_C, "k_weight_C": k_weight_C}
        if op == "qkv_rope":
            return qkv_rope(qkv, *tables, **weights, heads=HEADS, kv_heads=KV_HEADS)
        return qk_norm_rope(*_split(qkv)[:2], *tables, **weights)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


def _transposed(*shape: int) -> torch.Tensor:
    """A gradient as attention returns it: heads before positions in memory."""
    batch, length, heads, width = shape
    return torch.randn(batch, heads, length, width).transpose(1, 2)


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("implementation", fast("qkv_rope"))
def test_gradients_lie_anywhere(implementation, normed):
    inputs = {n: t.requires_grad_() for n, t in _qkv(2, 5, 16, norm=normed).items()}
    out = _run(implementation, _tables(5, 16))(**inputs)
    grads = [_transposed(*t.shape) for t in out]
    dense = [t.contiguous() for t in grads]
    apart = [t.repeat_interleave(2, dim=-1)[..., ::2] for t in grads]
    leaves = list(inputs.values())
    expected = torch.autograd.grad(out, leaves, dense, retain_graph=True)
    for found in (grads, apart):
        actual = torch.autograd.grad(out, leaves, found, retain_graph=True)
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("implementation", fast("qkv_rope"))
def test_outputs_nobody_uses_have_zero_gradients(implementation, normed, used, poisoned):
    inputs = {n: t.requires_grad_() for n, t in _qkv(2, 5, 16, norm=normed).items()}
    out = _run(implementation, _tables(5, 16))(**inputs)
    grads = [_transposed(*t.shape) for t in out]
    zeros = [g if i in used else torch.zeros_like(g) for i, g in enumerate(grads)]
    leaves = list(inputs.values())
    expected = torch.autograd.grad(out, leaves, zeros, retain_graph=True)
    actual = torch.autograd.grad([out[i] for i in used], leaves, [grads[i] for i in used])
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("implementation", runnable("qkv_rope"))
def test_v_is_a_view_and_the_others_are_dense(implementation):
    qkv = torch.randn(2, 5, COLUMNS * 8)
    q, k, v = _run(implementation, _tables(5, 8))(qkv)
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert q.is_contiguous()
    assert k.is_contiguous()


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("implementation", fast("qkv_rope"))
def test_saves_no_more_than_it_needs(implementation, normed):
    inputs = {n: t.requires_grad_() for n, t in _qkv(2, 5, 16, norm=normed).items()}
    tables, saved = _tables(5, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _run(implementation, tables)(**inputs)
    kept = [*tables, *(inputs.values() if normed else ())]
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in kept}


@pytest.mark.parametrize("layout", ["slice", "swapped"])
@pytest.mark.parametrize("implementation", fast("qk_norm_rope"))
def test_slices_of_one_projection_are_read_where_they_lie(implementation, layout):
    qkv = torch.randn(2, 5, COLUMNS * 16)
    if layout == "swapped":
        qkv = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    weights, tables = _weights(16), _tables(5, 16)
    q, k, _ = _split(qkv)
    with forced("qk_norm_rope", implementation):
        actual = qk_norm_rope(q, k, *tables, **weights)
        expected = qk_norm_rope(q.contiguous(), k.contiguous(), *tables, **weights)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("implementation", runnable("qkv_rope"))
def test_rows_that_are_not_there_do_not_count_even_without_eps(implementation):
    """More rows fit a block than there are."""
    inputs = {n: t.requires_grad_() for n, t in _qkv(1, 3, 16).items()}
    out = _run(implementation, _tables(3, 16), eps=0.0)(**inputs)
    grads = torch.autograd.grad(sum(t.sum() for t in out), list(inputs.values()))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("implementation", runnable("qkv_rope"))
def test_zero_tokens(implementation, normed, shape):
    inputs = {n: t.requires_grad_() for n, t in _qkv(*shape, 16, norm=normed).items()}
    out = _run(implementation, _tables(shape[1], 16))(**inputs)
    assert [t.shape for t in out] == [(*shape, n, 16) for n in (HEADS, KV_HEADS, KV_HEADS)]
    sum(t.sum() for t in out).backward()
    for leaf in inputs.values():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("implementation", runnable("qkv_rope"))
def test_qkv_rope_compiles(implementation, normed):
    tables = _tables(5, 8)

    def run(qkv, **weights):
        return qkv_rope(qkv, *tables, **weights, heads=HEADS, kv_heads=KV_HEADS)

    with forced("qkv_rope", implementation):
        assert_compiles(run, _qkv(2, 5, 10, norm=normed), truth=_stock(tables))


@pytest.mark.parametrize("implementation", runnable("qk_norm_rope"))
def test_qk_norm_rope_compiles(implementation):
    tables = _tables(5, 8)
    inputs = {"q": torch.randn(2, 5, 3, 10), "k": torch.randn(2, 5, 1, 10), **_weights(10)}

    def run(q, k, **weights):
        return qk_norm_rope(q, k, *tables, **weights)

    def stock(q, k, **weights):
        return eager_qk_norm_rope(q, k, *tables, **weights)

    with forced("qk_norm_rope", implementation):
        assert_compiles(run, inputs, truth=stock)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qkv_BLP": torch.randn(5, 56)}, r"qkv has shape \(5, 56\)"),
        ({"qkv_BLP": torch.randn(2, 5, 57)}, "qkv has 57 features, expected a multiple of .* = 7"),
        ({"heads": 0}, "heads = 0, kv_heads = 2, expected 1 or more"),
        ({"cos_LC": torch.randn(4, 4)}, r"cos has shape \(4, 4\), expected \(5, 4\)"),
        ({"q_weight_C": None}, "one of q_weight and k_weight is None; give both or neither"),
        ({"k_weight_C": torch.randn(7)}, r"k_weight has shape \(7,\), expected \(8\)"),
        ({"cast": "gemma"}, "cast = 'gemma', expected one of llama, fp32"),
        ({"eps": -1.0}, "eps = -1.0, expected a number of at least 0"),
        ({"qkv_BLP": torch.ones(2, 5, 56).long()}, "qkv has dtype torch.int64"),
        ({"q_weight_C": torch.ones(8).int()}, "q_weight has dtype torch.int32"),
    ],
)
def test_errors_of_qkv_rope_name_the_argument(arguments, message):
    cos, sin = _tables(5, 8)
    valid = {"qkv_BLP": torch.randn(2, 5, 56), "cos_LC": cos, "sin_LC": sin, **_weights(8)}
    with pytest.raises(ShapeError, match=message):
        qkv_rope(**{**valid, "heads": HEADS, "kv_heads": KV_HEADS, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_BLHC": torch.randn(5, 2, 8)}, r"q has shape \(5, 2, 8\)"),
        ({"k_BLGC": torch.randn(2, 5, 1, 6)}, r"k has shape \(2, 5, 1, 6\)"),
        ({"q_weight_C": torch.randn(2, 8)}, r"q_weight has shape \(2, 8\), expected \(8\)"),
    ],
)
def test_errors_of_qk_norm_rope_name_the_argument(arguments, message):
    cos, sin = _tables(5, 8)
    q, k = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 1, 8)
    valid = {"q_BLHC": q, "k_BLGC": k, "cos_LC": cos, "sin_LC": sin, **_weights(8)}
    with pytest.raises(ShapeError, match=message):
        qk_norm_rope(**{**valid, **arguments})
