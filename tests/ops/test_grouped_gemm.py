from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from slipstream.errors import ConfigError, ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import grouped_gemm
from slipstream.ops.moe.experts.grouped import refuse_grouped
from tests.budget import Results, assert_budget, results
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import DTYPES, EXAMPLES, cases, draws, fast, forced, runnable

OP = "grouped_gemm"
# Rows, first rows of each group, D, P.
GROUPS = {
    "odd": (257, [0, 100, 163, 257], 31, 17),
    "one-row": (1, [0, 1], 64, 48),
    "empty-groups": (63, [0, 0, 30, 30, 63, 63], 32, 24),
    "one-takes-all": (130, [0, 0, 0, 130], 32, 24),
    "rows-past-the-end": (63, [0, 20, 41], 32, 24),
    "no-row-in-any-group": (9, [0, 0, 0], 16, 8),
    "wide": (150, [0, 149, 150], 200, 136),
}


def _inputs(groups: str) -> Results:
    rows, edges, width, out = GROUPS[groups]
    w_EPD = torch.randn(len(edges) - 1, out, width) / width**0.5
    return {"x": torch.randn(rows, width), "w": w_EPD}


def _run(name: str, edges: list[int]):
    offsets_E1 = torch.tensor(edges, dtype=torch.int32)

    def run(x, w):
        with forced(OP, name):
            return grouped_gemm(x, w, offsets_E1)[: edges[-1]]

    return run


def _stock(edges: list[int]):
    def run(x, w):
        return torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(pairwise(edges))])

    return run


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_stays_in_budget(implementation, dtype, groups):
    edges = GROUPS[groups][1]
    inputs = draws(lambda: _inputs(groups))
    assert_budget(_run(implementation, edges), _stock(edges), inputs, dtype)


@pytest.mark.parametrize("groups", GROUPS)
def test_the_reference_matches_a_loop_with_its_gradients(groups):
    edges, inputs = GROUPS[groups][1], {n: t.double() for n, t in _inputs(groups).items()}
    found = results(_run("reference", edges), inputs, torch.float64)
    for name, expected in results(_stock(edges), inputs, torch.float64).items():
        assert_close(found[name], expected)


@pytest.mark.parametrize("implementation", fast(OP))
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    past=st.integers(0, 5),
    width=st.integers(1, 20),
    out=st.integers(1, 20),
)
def test_any_sizes_are_exact_where_arithmetic_is(implementation, counts, past, width, out):
    edges = [sum(counts[:e]) for e in range(len(counts) + 1)]
    x, w = (
        torch.randint(-2, 3, size).float().requires_grad_()
        for size in ((edges[-1] + past, width), (len(counts), out, width))
    )
    dy = torch.randint(-2, 3, (edges[-1], out)).float()
    found = []
    for run in (_run(implementation, edges), _stock(edges)):
        y = run(x, w)
        found.append([y, *torch.autograd.grad(y, (x, w), dy)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("implementation", runnable(OP))
def test_rows_past_the_last_offset_are_not_read_and_get_zero_gradients(implementation, poisoned):
    _, edges, *_ = GROUPS["rows-past-the-end"]
    inputs, found = _inputs("rows-past-the-end"), []
    for poison in (0.0, float("nan")):
        leaves = {name: t.clone() for name, t in inputs.items()}
        leaves["x"][edges[-1] :] = poison
        x, w = (t.requires_grad_() for t in leaves.values())
        with forced(OP, implementation):
            y_NP = grouped_gemm(x, w, torch.tensor(edges))
        dy_NP = torch.ones_like(y_NP)
        dy_NP[edges[-1] :] = poison
        dx, dw = torch.autograd.grad(y_NP, (x, w), dy_NP)
        assert (dx[edges[-1] :] == 0).all()
        found.append([y_NP[: edges[-1]], dx, dw])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("implementation", runnable(OP))
def test_groups_without_rows_get_exactly_zero_gradients(implementation, poisoned):
    edges = GROUPS["empty-groups"][1]
    found = results(_run(implementation, edges), _inputs("empty-groups"), torch.float32)
    grad = found["gradient of w"]
    assert torch.equal(grad[::2], torch.zeros_like(grad[::2]))
    assert (grad[1::2].abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_no_rows(implementation, dtype):
    x = torch.randn(0, 7).to(dtype).requires_grad_()
    w = torch.randn(3, 5, 7).to(dtype).requires_grad_()
    y = _run(implementation, [0, 0, 0, 0])(x, w)
    y.sum().backward()
    assert y.shape == (0, 5)
    assert x.grad.shape == (0, 7)
    assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
@pytest.mark.parametrize("which", ["x", "w"])
@pytest.mark.parametrize("implementation", fast(OP))
def test_memory_layout_does_not_change_the_result(implementation, which, layout):
    run, dense = _run(implementation, GROUPS["empty-groups"][1]), _inputs("empty-groups")
    tensor = dense[which]
    views = {
        "transposed": tensor.mT.contiguous().mT,
        "strided": tensor.repeat_interleave(2, dim=-1)[..., ::2],
        "offset": torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape),
    }
    found = []
    for inputs in (dense, {**dense, which: views[layout]}):
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        y = run(*leaves)
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_two_runs_are_bitwise_equal(implementation, dtype):
    inputs = {name: t.to(dtype) for name, t in _inputs("odd").items()}
    run = _run(implementation, GROUPS["odd"][1])
    first, second = (results(run, inputs, dtype) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_weights_of_another_dtype_and_autocast(implementation):
    dtype = torch.float16 if implementation == "triton" else torch.bfloat16
    inputs, run = _inputs("odd"), _run(implementation, GROUPS["odd"][1])
    x, w = (t.requires_grad_() for t in inputs.values())
    mixed = run(x.to(dtype), w)
    with torch.autocast(torch.get_default_device().type, dtype):
        cast = run(x, w)
    cast.sum().backward()
    assert mixed.dtype == cast.dtype == dtype
    assert torch.equal(mixed, cast)
    assert x.grad.dtype == w.grad.dtype == torch.float32


@pytest.mark.parametrize("groups", ["odd", "rows-past-the-end"])
@pytest.mark.parametrize("implementation", fast(OP))
def test_compiles(implementation, groups):
    edges = GROUPS[groups][1]
    offsets_E1 = torch.tensor(edges)
    run, inputs = _run(implementation, edges), _inputs(groups)
    run(**inputs)  # a refusal shows here as what it is
    with forced(OP, implementation):
        assert_compiles(
            lambda x, w: grouped_gemm(x, w, offsets_E1)[: edges[-1]], inputs, truth=_stock(edges)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_that_wait_for_the_host_are_refused_on_a_gpu(dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    served = []
    for device in ("cpu", "cuda"):
        cuda = device == "cuda"
        rows = Mock(spec=torch.Tensor, dtype=dtype, device=torch.device(device), is_cuda=cuda)
        refusal = refuse_grouped(rows)
        served.append(refusal is None)
        assert refusal is None or f"waits for the host in {dtype}" in refusal.reason
    assert served == [True, dtype == torch.bfloat16]


def test_fp64_is_served_by_the_reference_and_the_rest_by_the_fastest():
    dispatch.reset_counts()
    for dtype in (torch.float64, torch.float32, torch.float16):
        grouped_gemm(torch.ones(2, 8).to(dtype), torch.ones(1, 8, 8), torch.tensor([0, 2]))
    assert dispatch.counts() == {(OP, "reference"): 1, (OP, runnable(OP)[0]): 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_ND": torch.randn(6, 7)}, r"x has shape \(6, 7\), expected \(any, 8\)"),
        ({"x_ND": torch.ones(6, 8).int()}, "x has dtype torch.int32"),
        ({"w_EPD": torch.randn(4, 8)}, r"w has shape \(4, 8\)"),
        ({"w_EPD": torch.randn(2, 0, 8)}, r"w has shape \(2, 0, 8\), expected sizes above 0"),
        ({"w_EPD": torch.ones(2, 4, 8).long()}, "w has dtype torch.int64"),
        ({"offsets_E1": torch.tensor([0, 6])}, r"offsets has shape \(2,\), expected \(3\)"),
        (
            {"offsets_E1": torch.tensor([0.0, 3, 6])},
            "offsets has dtype torch.float32, expected int",
        ),
        ({"offsets_E1": torch.zeros(3, dtype=torch.int32, device="meta")}, "offsets on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"x_ND": torch.randn(6, 8), "w_EPD": torch.randn(2, 4, 8)}
    with pytest.raises(ShapeError, match=message):
        grouped_gemm(**{**valid, "offsets_E1": torch.tensor([0, 3, 6]), **arguments})


@pytest.mark.parametrize("offsets", [[0, 3, 99], [0, 7, 6], [-1, 3, 6], [2, 3, 6]])
def test_offsets_outside_the_rows_are_refused(offsets):
    # On a GPU their values are looked at only where the user asks for it.
    message = r"offsets = \[.*\], expected ascending row numbers from 0"
    with torch.device("cpu"), pytest.raises(ConfigError, match=message):
        grouped_gemm(torch.randn(6, 8), torch.randn(2, 4, 8), torch.tensor(offsets))
