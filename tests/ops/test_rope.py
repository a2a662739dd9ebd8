import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from slipstream.errors import ShapeError
from slipstream.ops import RopeSpec, rope, rope_tables
from slipstream.ops.rope.tables import inverse_frequencies
from tests.budget import assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import cases, fast, forced

HEAD_DIM = 64
LONG = tuple(1.0 + 0.5 * i for i in range(HEAD_DIM // 2))
SHORT = tuple(1.0 + 0.01 * i for i in range(HEAD_DIM // 2))
ORIGINAL = 128
VARIANTS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "longrope": {"factor": 4.0, "long_factor": LONG, "short_factor": SHORT},
}
MORE = {
    "yarn-betas": ("yarn", {"factor": 16.0, "beta_fast": 8.0, "beta_slow": 2.0}),
    "yarn-attention": ("yarn", {"factor": 4.0, "attention_factor": 0.7}),
    "yarn-factor-1": ("yarn", {"factor": 1.0}),
    "longrope-factor-1": (
        "longrope",
        {"factor": 1.0, "long_factor": LONG, "short_factor": SHORT},
    ),
    "llama3-narrow": ("llama3", {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}),
}
CASES = {**{name: (name, fields) for name, fields in VARIANTS.items()}, **MORE}


def _hf_config(scaling: str, fields: dict, theta: float) -> LlamaConfig:
    parameters = {
        "rope_type": scaling,
        "rope_theta": theta,
        "original_max_position_embeddings": ORIGINAL,
        **fields,
    }
    return LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=ORIGINAL,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_match_hugging_face(case, theta, length):
    scaling, fields = CASES[case]
    spec = RopeSpec(
        head_dim=HEAD_DIM, theta=theta, scaling=scaling, original_len=ORIGINAL, **fields
    )
    actual, factor = inverse_frequencies(spec, length)
    config = _hf_config(scaling, fields, theta)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling](config, None, seq_len=length)
    assert_close(actual, expected, rtol=1.3e-6, atol=0)  # PyTorch's fp32 rtol, nothing absolute
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_unscaled_tables_are_those_of_hugging_face():
    config = _hf_config("default", {}, 1e4)
    positions = torch.arange(63)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rope_tables(RopeSpec(head_dim=HEAD_DIM), 63)
    assert_close(torch.cat((ours[0], ours[0]), dim=-1), cos[0])
    assert_close(torch.cat((ours[1], ours[1]), dim=-1), sin[0])


def test_attention_factor_multiplies_both_tables():
    plain = rope_tables(RopeSpec(head_dim=8), 5)
    scaled = rope_tables(RopeSpec(head_dim=8, attention_factor=0.5), 5)
    assert_close(scaled, (0.5 * plain[0], 0.5 * plain[1]))


def _tables(length: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(RopeSpec(head_dim=rotated), length)


def _stock(q_BLHC, k_BLGC, cos_LC, sin_LC):
    cos, sin = (torch.cat((t, t), dim=-1)[None].to(q_BLHC.dtype) for t in (cos_LC, sin_LC))
    q, k = apply_rotary_pos_emb(q_BLHC.transpose(1, 2), k_BLGC.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def test_matches_hugging_face_in_fp64():
    q, k = torch.randn(2, 63, 4, 16).double(), torch.randn(2, 63, 2, 16).double()
    cos, sin = _tables(63, 16)
    assert_close(rope(q, k, cos, sin), _stock(q, k, cos, sin))


@pytest.mark.parametrize("length", [1, 63, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_as_accurate_as_hugging_face(dtype, length):
    cos, sin = _tables(length, 16)
    inputs = {"q": torch.randn(2, length, 3, 16), "k": torch.randn(2, length, 1, 16)}
    assert_budget(
        lambda q, k: rope(q, k, cos, sin), lambda q, k: _stock(q, k, cos, sin), inputs, dtype
    )


def test_gradients_in_fp64():
    cos, sin = _tables(3, 4)
    q = torch.randn(1, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 3, 1, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), (q, k))


def test_features_past_the_tables_pass_unchanged():
    cos, sin = _tables(5, 8)
    q, k = torch.randn(1, 5, 2, 12), torch.randn(1, 5, 2, 12)
    turned_q, turned_k = rope(q, k, cos, sin)
    narrow_q, _ = rope(q[..., :8], k[..., :8], cos, sin)
    assert torch.equal(turned_q[..., 8:], q[..., 8:])
    assert torch.equal(turned_k[..., 8:], k[..., 8:])
    assert torch.equal(turned_q[..., :8], narrow_q)


def test_scores_depend_on_the_distance_only():
    cos, sin = (table.double() for table in _tables(40, 16))
    q, k = torch.randn(2, 16, dtype=torch.float64)
    rows = [t.expand(1, 40, 1, 16) for t in (q, k)]
    turned_q, turned_k = (t[0, :, 0] for t in rope(*rows, cos, sin))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(distance)
        # The tables are fp32.
        assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1.3e-6, atol=1e-5)


def test_zero_tokens_and_zero_batch():
    for batch, length in ((0, 5), (2, 0)):
        q = torch.randn(batch, length, 2, 8, requires_grad=True)
        k = torch.randn(batch, length, 1, 8)
        turned_q, turned_k = rope(q, k, *_tables(length, 8))
        turned_q.sum().backward()
        assert turned_q.shape == q.grad.shape == (batch, length, 2, 8)
        assert turned_k.shape == k.shape


def test_strided_inputs_and_expanded_gradients():
    cos, sin = _tables(5, 8)
    q = torch.randn(2, 3, 5, 8).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 5, 1, 16)[..., ::2].requires_grad_()
    turned_q, turned_k = rope(q, k, cos, sin)
    (turned_q.sum() + turned_k.sum()).backward()
    dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in (q, k)]
    expected = rope(*dense, cos, sin)
    assert torch.equal(turned_q, expected[0])
    assert torch.equal(turned_k, expected[1])
    # The adjoint of a rotation of ones: cos + sin for the first half, cos - sin for the second.
    half = torch.cat((cos + sin, cos - sin), dim=-1)[:, None]
    assert_close(q.grad, half.expand(2, 5, 3, 8))
    assert_close(k.grad, half.expand(2, 5, 1, 8))


@pytest.mark.parametrize(
    ("width", "rotated", "heads"),
    [(16, 16, (3, 1)), (24, 16, (4, 4)), (33, 10, (1, 2)), (6, 2, (12, 3))],
    ids=str,
)
@pytest.mark.parametrize(("implementation", "dtype"), cases("rope"))
def test_every_implementation_stays_in_budget(
    implementation, dtype, width, rotated, heads, poisoned
):
    cos, sin = _tables(37, rotated)
    q, k = (torch.randn(2, 37, n, width) for n in heads)

    def run(q, k):
        with forced("rope", implementation):
            return rope(q, k, cos, sin)

    def stock(q, k):
        turned = _stock(q[..., :rotated], k[..., :rotated], cos, sin)
        rest = q[..., rotated:], k[..., rotated:]
        return tuple(torch.cat(parts, dim=-1) for parts in zip(turned, rest, strict=True))

    assert_budget(run, stock, {"q": q, "k": k}, dtype)


@pytest.mark.parametrize("layout", ["transposed", "slice", "apart"])
@pytest.mark.parametrize("implementation", fast("rope"))
def test_inputs_and_gradients_lie_anywhere(implementation, layout):
    cos, sin = _tables(5, 16)
    qkv, grads = torch.randn(2, 5, 7, 16), [torch.randn(2, 5, n, 16) for n in (3, 2)]

    def lay(x: torch.Tensor) -> torch.Tensor:
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return x.repeat_interleave(2, dim=-1)[..., ::2] if layout == "apart" else x

    def run(q, k, grads):
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
        with forced("rope", implementation):
            out = rope(*leaves, cos, sin)
        return *out, *torch.autograd.grad(out, leaves, grads)

    q, k = qkv[:, :, :3], qkv[:, :, 3:5]
    actual = run(lay(q), lay(k), [lay(g) for g in grads])
    expected = run(q.contiguous(), k.contiguous(), grads)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("implementation", fast("rope"))
def test_saves_the_tables_alone_and_one_output_suffices(implementation):
    cos, sin = _tables(5, 8)
    q, k = (torch.randn(2, 5, n, 8, requires_grad=True) for n in (2, 1))
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        forced("rope", implementation),
    ):
        turned_q, turned_k = rope(q, k, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}
    both = torch.autograd.grad(turned_q.sum() + turned_k.sum(), (q, k), retain_graph=True)
    for out, leaf, other, expected in ((turned_q, q, k, both[0]), (turned_k, k, q, both[1])):
        grad, none = torch.autograd.grad(
            out.sum(), (leaf, other), retain_graph=True, allow_unused=True
        )
        assert torch.equal(grad, expected)
        assert none is None


def test_tables_that_want_gradients_get_them():
    cos, sin = (table.requires_grad_() for table in _tables(5, 8))
    q, k = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 1, 8)
    turned_q, _ = rope(q, k, cos, sin)
    (dcos,) = torch.autograd.grad(turned_q.sum(), cos)
    assert_close(dcos, (q[..., :4] + q[..., 4:]).sum((0, 2)))


def test_the_tuned_table_has_tiles_for_every_device():
    tuned = pytest.importorskip("slipstream.ops.rope.tuned")
    for element_size in (2, 4):
        for capability in (tuned.INTERPRETER, 80, 89, 90, 100, 120):
            assert tuned._find("turn", element_size, capability).features >= 256
            tile = tuned._find("norm_backward", element_size, capability)
            assert tile.programs_per_sm > 0 or capability == tuned.INTERPRETER


def test_compiles():
    cos, sin = _tables(5, 8)
    inputs = {"q": torch.randn(2, 5, 2, 10), "k": torch.randn(2, 5, 1, 10)}
    assert_compiles(lambda q, k: rope(q, k, cos, sin), inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_BLHC": torch.randn(5, 2, 8)}, r"q has shape \(5, 2, 8\)"),
        ({"k_BLGC": torch.randn(2, 4, 1, 8)}, r"k has shape \(2, 4, 1, 8\), expected \(2, 5, any"),
        ({"k_BLGC": torch.randn(2, 5, 1, 6)}, r"k has shape"),
        ({"cos_LC": torch.randn(4, 4)}, r"cos has shape \(4, 4\), expected \(5, 4\)"),
        ({"cos_LC": torch.randn(4)}, r"cos has shape \(4,\)"),
        ({"sin_LC": torch.randn(5, 3)}, r"sin has shape \(5, 3\), expected \(5, 4\)"),
        ({"cos_LC": torch.randn(5, 5), "sin_LC": torch.randn(5, 5)}, "turn 10 features"),
        ({"q_BLHC": torch.ones(2, 5, 2, 8).long()}, "q has dtype torch.int64"),
        ({"sin_LC": torch.ones(5, 4).int()}, "sin has dtype torch.int32"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    cos, sin = _tables(5, 8)
    valid = {"q_BLHC": torch.randn(2, 5, 2, 8), "k_BLGC": torch.randn(2, 5, 1, 8)}
    with pytest.raises(ShapeError, match=message):
        rope(**{**valid, "cos_LC": cos, "sin_LC": sin, **arguments})
