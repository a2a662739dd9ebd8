from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slipstream.errors import HardwareError, ShapeError
from slipstream.ops import activation_norm, dispatch, norm
from slipstream.ops.norm import autograd, tuned
from slipstream.ops.norm.tuned import Tile
from slipstream.verify.budget import bitwise_equal, results
from tests.budget import assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import ONE, cases, draws, forced, runnable

KINDS = ["rms", "layer"]
EPS = 1e-6
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
DTYPES = [torch.float32, torch.bfloat16]
IMPLEMENTATIONS = runnable("norm")


def _stock(x, weight_D, bias_D=None, residual=None, kind="rms", activation=None):
    s = x if activation is None else ACTIVATIONS[activation](x)
    s = s if residual is None else s + residual
    if kind == "layer":
        return F.layer_norm(s, s.shape[-1:], weight_D, bias_D, EPS), s
    y = F.rms_norm(s, s.shape[-1:], weight_D, EPS)
    return (y if bias_D is None else y + bias_D), s


def _inputs(*shape: int, bias: bool = True, residual: bool = True) -> dict[str, torch.Tensor]:
    inputs = {"x": torch.randn(shape) + 0.3, "weight_D": torch.randn(shape[-1])}
    if bias:
        inputs["bias_D"] = torch.randn(shape[-1])
    if residual:
        inputs["residual"] = torch.randn(shape)
    return inputs


def _triton(**options: Any) -> Callable[..., Any]:
    def run(**tensors):
        with forced("norm", "triton"):
            return norm(**tensors, **options)

    return run


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("cast", ["llama", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_torch_in_fp64(kind, cast, activation):
    inputs = {name: tensor.double() for name, tensor in _inputs(7, 33).items()}
    actual = norm(**inputs, kind=kind, cast=cast, activation=activation)
    assert_close(actual, _stock(**inputs, kind=kind, activation=activation))


@pytest.mark.parametrize("shape", [(1, 63), (63, 257), (2, 5, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_is_as_accurate_as_torch(kind, dtype, shape):
    assert_budget(
        lambda **t: norm(**t, kind=kind, cast="fp32"),
        lambda **t: _stock(**t, kind=kind),
        draws(lambda: _inputs(*shape, bias=kind == "layer")),
        dtype,
    )


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("cast", ["llama", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), cases("norm", interpreted=ONE))
@pytest.mark.usefixtures("poisoned")
def test_is_as_accurate_as_the_reference(name, dtype, kind, cast, activation):
    def run(implementation):
        def of(**tensors):
            with forced("norm", implementation):
                return norm(**tensors, kind=kind, cast=cast, activation=activation)

        return of

    assert_budget(run(name), run("reference"), draws(lambda: _inputs(65, 130)), dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(("name", "dtype"), cases("norm", interpreted=ONE))
def test_with_and_without_bias_and_residual(name, dtype, activation, residual, bias):
    def run(**tensors):
        with forced("norm", name):
            return norm(**tensors, cast="fp32", activation=activation)

    inputs = draws(lambda: _inputs(19, 40, bias=bias, residual=residual))
    assert_budget(run, lambda **t: _stock(**t, activation=activation), inputs, dtype)


@pytest.mark.parametrize("width", [1, 2, 63, 257, 1024])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), cases("norm", interpreted=ONE))
def test_widths(name, dtype, kind, width):
    def run(**tensors):
        with forced("norm", name):
            # The rounding of LayerNorm over one column is all there is to it.
            return norm(**tensors, kind=kind, cast="fp32")

    inputs = draws(lambda: _inputs(33, width, bias=kind == "layer"))
    assert_budget(run, lambda **t: _stock(**t, kind=kind), inputs, dtype)


TILES = {
    "one-row": {"block_t": 1, "num_stages": 1, "programs_per_sm": 0},
    "few-rows": {"block_t": 2, "num_stages": 3, "programs_per_sm": 3},
    "many-rows": {"block_t": 8, "num_stages": 2, "programs_per_sm": 2},
    "more-rows-than-there-are": {"block_t": 64, "num_stages": 2, "programs_per_sm": 2},
    "wide": {"block_t": 1, "block_d": 64, "num_stages": 1, "programs_per_sm": 0},
    "wide-rows": {"block_t": 4, "block_d": 32, "num_stages": 2, "programs_per_sm": 2},
}


@pytest.mark.parametrize(("kind", "activation"), [("rms", None), ("layer", "silu")])
@pytest.mark.parametrize("tile", TILES.values(), ids=list(TILES))
@pytest.mark.usefixtures("poisoned")
def test_tiles(tile, kind, activation):
    """Any way to cut the rows up is within the budget."""
    tile = Tile(**{"block_d": 128, "num_warps": 4, **tile})
    columns = Tile(block_t=4, block_d=64, num_warps=4, num_stages=1, programs_per_sm=8)
    with tuned.force(forward=tile, backward=tile, weight=columns, sum=columns):
        assert_budget(
            _triton(kind=kind, cast="fp32", activation=activation),
            lambda **t: _stock(**t, kind=kind, activation=activation),
            _inputs(19, 126, bias=kind == "layer"),
            torch.float16,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_more_columns_than_a_block_can_have(kind):
    run = _triton(kind=kind, cast="fp32")
    inputs = _inputs(2, 100003, bias=kind == "layer")
    assert_budget(run, lambda **t: _stock(**t, kind=kind), inputs, torch.float32)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("cast", ["llama", "fp32"])
def test_weights_and_residual_of_another_dtype(cast, activation):
    inputs = _inputs(33, 40)
    inputs["x"] = inputs["x"].half()

    def run(implementation, **tensors):
        with forced("norm", implementation):
            return norm(**tensors, kind="layer", cast=cast, activation=activation)

    found = [
        results(lambda name=name, **t: run(name, **t), inputs, torch.float16)
        for name in ("triton", "reference")
    ]
    for name, expected in found[1].items():
        assert found[0][name].dtype == expected.dtype
        # The reference rounds every gradient on its way to fp16.
        assert_close(found[0][name], expected, atol=0.02, rtol=0.01)
    assert found[0]["gradient of residual"].dtype == torch.float32


def test_cast_llama_is_bitwise_the_norm_of_llama():
    x, weight_D = torch.randn(63, 64).bfloat16(), torch.randn(64).bfloat16()
    module = LlamaRMSNorm(64, eps=EPS).bfloat16()
    module.weight.data.copy_(weight_D)
    assert torch.equal(norm(x, weight_D, cast="llama")[0], module(x))
    assert not torch.equal(norm(x, weight_D, cast="fp32")[0], module(x))


def test_offset_with_cast_fp32_is_bitwise_the_norm_of_gemma():
    x, weight_D = torch.randn(63, 64).bfloat16(), torch.randn(64).bfloat16()
    module = GemmaRMSNorm(64, eps=EPS).bfloat16()
    module.weight.data.copy_(weight_D)
    assert torch.equal(norm(x, weight_D, cast="fp32", offset=1.0)[0], module(x))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast", ["llama", "fp32"])
def test_the_kernels_round_where_the_reference_does(cast, offset):
    """Rows of plus and minus a power of two have exact statistics: the bits must be the same."""
    x = (torch.randint(0, 2, (33, 64)) * 2 - 1).half() * 4
    weight_D, bias_D = torch.randn(64), torch.randn(64)
    found = []
    for name in ("triton", "reference"):
        with forced("norm", name):
            # eps = 9: each value is 4 / 5 of what it would be, rounded in fp16.
            found.append(norm(x, weight_D, bias_D, cast=cast, offset=offset, eps=9.0)[0])
    assert (found[0] - found[1]).abs().max() <= (0.0 if cast == "llama" else 2**-9)
    other = norm(x, weight_D, bias_D, cast={"llama": "fp32", "fp32": "llama"}[cast], eps=9.0)[0]
    assert not torch.equal(found[0], other)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_fp64(kind, activation):
    inputs = [tensor.double().requires_grad_() for tensor in _inputs(3, 5).values()]

    def run(x, weight_D, bias_D, residual):
        return norm(x, weight_D, bias_D, residual=residual, kind=kind, activation=activation)

    assert torch.autograd.gradcheck(run, inputs)


def test_fp64_is_not_for_the_kernels():
    with forced("norm", "triton"), pytest.raises(HardwareError, match="float64"):
        norm(torch.randn(2, 8).double(), torch.ones(8).double())


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_without_activation_and_residual_s_is_x(name):
    x = torch.randn(3, 8)
    with forced("norm", name):
        assert torch.equal(norm(x, torch.ones(8))[1], x)
        assert torch.equal(norm(x.requires_grad_(), torch.ones(8))[1], x)
        with torch.no_grad():
            assert torch.equal(norm(x, torch.ones(8))[1], x)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_s_is_rounded_before_it_is_normalised(name):
    x, residual = torch.randn(2, 31, 64).half()
    with forced("norm", name):
        y, s = norm(x, torch.ones(64).half(), residual=residual)
        assert torch.equal(s, x + residual)
        assert torch.equal(y, norm(s, torch.ones(64).half())[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_do_not_overflow_in_16_bit(dtype):
    x = torch.full((2, 8), 30000.0).to(dtype)
    assert torch.equal(norm(x, torch.ones(8).to(dtype))[0], torch.ones(2, 8).to(dtype))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_of_zeros_gives_zeros_and_finite_gradients(name):
    x = torch.zeros(2, 8, requires_grad=True)
    with forced("norm", name):
        y, _ = norm(x, torch.ones(8))
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.usefixtures("poisoned")
def test_zero_tokens(name, shape):
    x, weight_D = torch.randn(shape, requires_grad=True), torch.ones(8, requires_grad=True)
    with forced("norm", name):
        y, s = norm(x, weight_D, residual=torch.randn(shape))
    y.sum().backward()
    assert y.shape == s.shape == x.grad.shape == shape
    assert torch.equal(weight_D.grad, torch.zeros(8))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_strided_inputs_and_expanded_gradients(name):
    x = torch.randn(16, 9).T.requires_grad_()
    residual = torch.randn(9, 32)[:, ::2]
    weight_D = torch.randn(32)[::2].requires_grad_()
    copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in (x, weight_D)]
    for copy in copies:
        copy.requires_grad_()
    with forced("norm", name):
        y, s = norm(x, weight_D, residual=residual)
        y2, s2 = norm(*copies, residual=residual.contiguous())
    (y.sum() + s.sum()).backward()
    (y2 * torch.ones(9, 16) + s2 * torch.ones(9, 16)).sum().backward()
    assert_close((y, s), (y2, s2))
    assert_close((x.grad, weight_D.grad), (copies[0].grad, copies[1].grad))


def test_rows_at_a_distance_are_read_where_they_are():
    """Columns of a wider tensor: rows, gradients and residual each with their own stride."""
    wide = torch.randn(3, 21, 96)
    x, residual, dy = wide[0, :, 8:72], wide[1, :, 32:], wide[2, :, :64]
    weight_D, found = torch.randn(64), []
    for rows in ((x, residual, dy), tuple(t.contiguous() for t in (x, residual, dy))):
        inputs = [t.detach().requires_grad_() for t in (rows[0], weight_D, rows[1])]
        y, s = _triton()(x=inputs[0], weight_D=inputs[1], residual=inputs[2])
        found.append((y, s, *torch.autograd.grad((y, s), inputs, (rows[2], rows[2]))))
    for strided, contiguous in zip(*found, strict=True):
        assert bitwise_equal(strided, contiguous)


def test_gelu_of_every_16_bit_number():
    """The short formula is within 4.5e-6 of the tail of the normal distribution."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()].view(-1, 1024)
    _, s = _triton(activation="gelu")(x=x, weight_D=torch.ones(1024).half())
    exact = F.gelu(x.double())
    # The formula, fp32 arithmetic, and the rounding of s: relative, or of the smallest numbers.
    allowed = (1e-6 + 2**-23) * x.double().abs() + 2**-11 * exact.abs() + 2**-25
    assert ((s.double() - exact).abs() <= allowed).all()


NAMES = ("x", "weight_D", "bias_D", "residual")


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("wanted", range(1, 16))
@pytest.mark.usefixtures("poisoned")
def test_only_gradients_that_are_asked_for(wanted, activation):
    """A frozen weight or input changes no bit of the other gradients."""
    inputs = {name: t.requires_grad_() for name, t in _inputs(9, 24).items()}
    upstream = torch.randn(2, 9, 24).unbind()
    run = _triton(kind="layer", activation=activation)
    full = torch.autograd.grad(run(**inputs), list(inputs.values()), upstream)
    expected = dict(zip(inputs, full, strict=True))
    asked = [name for i, name in enumerate(NAMES) if wanted >> i & 1]
    some = {n: t.detach().requires_grad_(n in asked) for n, t in inputs.items()}
    grads = torch.autograd.grad(run(**some), [some[name] for name in asked], upstream)
    for name, grad in zip(asked, grads, strict=True):
        assert bitwise_equal(grad, expected[name])


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("output", [0, 1])
def test_an_output_that_is_not_used(output, residual, activation):
    inputs = _inputs(9, 24, residual=residual)
    of_weight = {"weight_D", "bias_D"} if output == 1 else set()
    found = []
    for name in ("triton", "reference"):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        with forced("norm", name):
            used = norm(**leaves, activation=activation)[output]
        wanted = [leaf for n, leaf in leaves.items() if n not in of_weight]
        upstream = torch.linspace(-1, 1, used.numel()).view_as(used)
        found.append(torch.autograd.grad(used, wanted, upstream))
    assert_close(*found)


def test_a_gradient_of_s_that_did_not_come_is_not_read(monkeypatch):
    seen = []

    def spy(dy, ds, *rest):
        seen.append(ds)
        return norm_backward(dy, ds, *rest)

    norm_backward = autograd.norm_backward
    monkeypatch.setattr(autograd, "norm_backward", spy)
    for activation in (None, "gelu"):
        inputs = {n: t.requires_grad_() for n, t in _inputs(4, 8).items()}
        _triton(activation=activation)(**inputs)[0].sum().backward()
    assert seen == [None, None]


def test_x_and_residual_share_their_gradient():
    """Without an activation they are the same numbers, written once."""
    inputs = {n: t.requires_grad_() for n, t in _inputs(4, 8).items()}
    y, _ = _triton()(**inputs)
    dx, dresidual = torch.autograd.grad(y.sum(), [inputs["x"], inputs["residual"]])
    assert dx.data_ptr() == dresidual.data_ptr()
    # Accumulation must not write to what they share.
    for _ in range(2):
        (_triton()(**inputs)[0].sum() + inputs["x"].sum()).backward()
    assert_close(inputs["x"].grad, 2 * (dx + 1))
    assert_close(inputs["residual"].grad, 2 * dresidual)


def test_one_tensor_as_x_and_residual():
    x, weight_D = torch.randn(5, 16, requires_grad=True), torch.randn(16)
    found = []
    for name in ("triton", "reference"):
        with forced("norm", name):
            y, s = norm(x, weight_D, residual=x)
        found.append((y, s, *torch.autograd.grad((y * y).sum() + s.sum(), x)))
    assert_close(*found)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_runs_are_bitwise_equal(activation):
    inputs = _inputs(65, 48)
    run = _triton(kind="layer", activation=activation)
    first, second = (results(run, inputs, torch.float32) for _ in range(2))
    assert all(bitwise_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_activation_norm_is_the_first_output(name):
    x = torch.randn(9, 24, requires_grad=True)
    weight_D, bias_D = torch.randn(24, requires_grad=True), torch.randn(24, requires_grad=True)
    with forced("norm", name):
        y = activation_norm(x, weight_D, bias_D, activation="gelu")
        expected, _ = norm(x, weight_D, bias_D, kind="layer", activation="gelu")
    assert bitwise_equal(y, expected)
    leaves = (x, weight_D, bias_D)
    found = (torch.autograd.grad((out * out).sum(), leaves) for out in (y, expected))
    for actual, other in zip(*found, strict=True):
        assert bitwise_equal(actual, other)


def test_autocast_does_not_apply():
    inputs = _inputs(5, 16)
    with forced("norm", "triton"):
        expected = norm(**inputs)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            actual = norm(**inputs)
    assert all(bitwise_equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_compiles(name, activation, residual):
    def run(**tensors):
        return norm(**tensors, kind="layer", cast="fp32", activation=activation)

    with forced("norm", name):
        assert_compiles(
            run,
            _inputs(5, 16, residual=residual),
            truth=lambda **t: _stock(**t, kind="layer", activation=activation),
        )


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("capability", [tuned.INTERPRETER, 80, 86, 89, 90, 100, 103, 120])
def test_every_width_has_a_tile_that_fits(capability, direction):
    for width in (1, 63, 64, 257, 2048, 2049, 5120, 8192, 16384, 16385, 100003):
        for column_bytes in (2, 6, 8, 16):
            tile = tuned.lookup(direction, capability, width, column_bytes)
            assert tile.block_d >= width or width > 16384
            assert tile.block_d & (tile.block_d - 1) == tile.block_t & (tile.block_t - 1) == 0
            ahead = (tile.num_stages - 1) * tile.block_t * tile.block_d * column_bytes
            shared = {86: 99, 89: 99, 120: 99, 80: 163}.get(capability, 227)
            if capability:
                assert max(1, tile.programs_per_sm) * ahead <= shared << 10
            # A thread with fewer registers would spill.
            assert tile.max_registers is None or capability == 0 or tile.max_registers >= 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_D": torch.ones(7)}, r"weight has shape \(7,\)"),
        ({"weight_D": torch.ones(2, 8)}, r"weight has shape \(2, 8\)"),
        ({"bias_D": torch.ones(9)}, r"bias has shape \(9,\)"),
        ({"residual": torch.ones(1, 8)}, r"residual \(1, 8\)"),
        ({"x": torch.tensor(1.0)}, "x is a scalar"),
        ({"x": None}, "x is None, expected a tensor"),
        ({"x": torch.ones(3, 8).long()}, "x has dtype torch.int64, expected float64, .*; cast it"),
        ({"weight_D": torch.ones(8).cfloat()}, "weight has dtype torch.complex64"),
        ({"eps": float("nan")}, "eps = nan, expected a number of at least 0"),
        ({"kind": "batch"}, "kind = 'batch', expected one of rms, layer"),
        ({"cast": "bf16"}, "cast = 'bf16'"),
        ({"activation": "tanh"}, "activation = 'tanh'"),
        ({"weight_D": torch.ones(8, device="meta")}, "weight on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ShapeError, match=message):
        norm(**{"x": torch.randn(3, 8), "weight_D": torch.ones(8), **arguments})


def test_the_kernels_are_first():
    assert dispatch.implementations("norm") == ["triton", "reference"]
