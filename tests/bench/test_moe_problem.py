"""The problem all peers share: sizes, clear choices, skew, and the truth."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.bench.moe_problem import (
    POPULARITY_DRAWS,
    Problem,
    make_problem,
    parse_shape,
    plain_dense,
    plain_layer,
    zipf_popularity,
)
from slipstream.errors import ConfigError

CPU = torch.device("cpu")


def problem(
    text: str = "257,48,24,6,3", skew: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    return make_problem(parse_shape(text), skew=skew, dtype=dtype, device=CPU)


def test_shapes_by_name_and_by_numbers() -> None:
    olmoe = parse_shape("olmoe")
    assert (olmoe.tokens, olmoe.width, olmoe.hidden, olmoe.experts, olmoe.top_k) == (
        32768, 2048, 1024, 64, 8,
    )  # fmt: skip
    assert olmoe.flops == 18 * 32768 * 8 * 1024 * 2048
    assert parse_shape("mixtral-short").tokens == 4096
    assert parse_shape("7,16,8,4,2").top_k == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("olmo", "expected T,D,F,E,K or one of olmoe"),
        ("1,2,3,4", "expected T,D,F,E,K"),
        ("1,2,3,4,x", "expected T,D,F,E,K"),
        ("0,2,3,4,1", "at least 1"),
        ("8,2,3,4,5", "K = 5 exceeds E = 4"),
    ],
)
def test_wrong_shapes_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_shape(text)


@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_no_choice_hangs_on_rounding(skew: float) -> None:
    made = problem("512,64,8,32,4", skew)
    x, router = made.leaves["x"].detach(), made.leaves["router"].detach()
    exact = (x.double() @ router.double().T).topk(4, dim=1)[1].sort(dim=1)[0]
    rounded = (x @ router.T).topk(4, dim=1)[1].sort(dim=1)[0]
    assert torch.equal(exact, rounded)
    assert torch.equal(exact.flatten().bincount(minlength=32), made.load_E)


def test_zipf_popularity_without_replacement() -> None:
    shares = zipf_popularity(4, 1, 1.0, torch.Generator().manual_seed(0)).sort(descending=True)[0]
    expected = torch.tensor([1.0, 1 / 2, 1 / 3, 1 / 4], dtype=torch.float64)
    expected /= expected.sum()
    sigma = (expected * (1 - expected) / POPULARITY_DRAWS).sqrt()
    assert ((shares - expected).abs() < 5 * sigma).all()
    all_of_them = zipf_popularity(3, 3, 1.2, torch.Generator().manual_seed(0))
    assert all_of_them.tolist() == [1.0, 1.0, 1.0]


def test_skew_reaches_the_load_through_the_router() -> None:
    made = problem("4096,64,8,16,2", skew=1.2)
    wanted = zipf_popularity(16, 2, 1.2, torch.Generator().manual_seed(1)).sort(descending=True)[0]
    shares = made.load_E.sort(descending=True)[0] / 4096
    sigma = (wanted * (1 - wanted) * (1 / 4096 + 1 / POPULARITY_DRAWS)).sqrt()
    assert ((shares - wanted).abs() < 5 * sigma).all()
    assert made.max_over_mean > 4 > 2 > problem("4096,64,8,16,2").max_over_mean


def test_the_plain_layer_is_the_weighted_sum_of_all_experts() -> None:
    made = problem()
    x, router, w13, w2 = (leaf.detach().double().requires_grad_() for leaf in made.leaves.values())
    prob_TE = (x @ router.T).softmax(-1)
    kept_TE = prob_TE * (prob_TE >= prob_TE.topk(3, dim=1)[0][:, -1:])
    gate, up = torch.einsum("td,epd->etp", x, w13).chunk(2, dim=-1)
    y_ETD = torch.einsum("etf,edf->etd", F.silu(gate) * up, w2)
    out = torch.einsum("te,etd->td", kept_TE / kept_TE.sum(1, keepdim=True), y_ETD)
    grads = torch.autograd.grad(out, (x, router, w13, w2), made.dout_TD.double())
    found = plain_layer(made, torch.float64)
    for tensor, expected in zip(found.values(), (out, *grads), strict=True):
        torch.testing.assert_close(tensor, expected.detach())


def test_the_plain_dense_layer_in_chunks_is_the_layer() -> None:
    made = problem("4097,8,16,2,1", dtype=torch.float64)
    leaves = {"x": made.leaves["x"], "w13": made.leaves["w13"][0], "w2": made.leaves["w2"][0]}
    x, w13, w2 = (leaf.detach().requires_grad_() for leaf in leaves.values())
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    out = (F.silu(gate) * up) @ w2.T
    grads = torch.autograd.grad(out, (x, w13, w2), made.dout_TD)
    found = plain_dense(leaves, made.dout_TD, torch.float64)
    assert list(found) == ["output", "gradient of x", "gradient of w13", "gradient of w2"]
    for tensor, expected in zip(found.values(), (out, *grads), strict=True):
        torch.testing.assert_close(tensor, expected.detach())
