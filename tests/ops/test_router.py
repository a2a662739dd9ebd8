from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from slipstream.errors import ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import router_logits, router_logits_and_x
from slipstream.ops.triton_support import refusal
from tests.budget import assert_budget, assert_within, results
from tests.ops.compiling import assert_compiles

SHAPES = [(1, 16, 1), (63, 40, 8), (257, 130, 20), (130, 33, 132)]
ROUTERS = [torch.float32, torch.bfloat16, torch.float16]


def _forced(implementation: str) -> Callable[..., torch.Tensor]:
    def run(x, router):
        with dispatch.force(moe_router=implementation):
            return router_logits(x, router)

    return run


@pytest.fixture
def kernels() -> Callable[..., torch.Tensor]:
    if refused := refusal(torch.empty(0)):
        pytest.skip(refused.reason)
    return _forced("triton")


def _inputs(shape: tuple[int, int, int], router: torch.dtype) -> dict[str, torch.Tensor]:
    tokens, width, experts = shape
    return {
        "x": torch.randn(tokens, width).bfloat16(),
        "router": (torch.randn(experts, width) / width**0.5).to(router),
    }


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "T{}-D{}-E{}".format(*s))
def test_bf16_tokens_are_within_budget(kernels, shape, router):
    inputs, reference = _inputs(shape, router), _forced("reference")
    run_in = [results(f, inputs, torch.bfloat16) for f in (kernels, reference)]
    truth = results(reference, inputs, torch.bfloat16, run_in=torch.float64)
    # Logits to fp32, and so is the gradient of an fp32 router; the rest is rounded to bf16.
    assert_within(*({"logits": r["output 0"]} for r in (*run_in, truth)), torch.float32)
    assert_within(*run_in, truth, torch.bfloat16)


def test_logits_use_every_bit_of_an_fp32_router(kernels):
    x = torch.eye(32).bfloat16()
    router = torch.randn(8, 32) * torch.logspace(-20, 20, 32)
    assert torch.equal(kernels(x, router), router.T)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize(("experts", "programs"), [(8, 1), (8, 264), (65, 1), (130, 264)])
def test_products_of_integers_are_exact(kernels, experts, programs, router, monkeypatch):
    monkeypatch.setattr("slipstream.ops.moe.router.launch.PROGRAMS", programs)
    # All bits of a bf16, and more tokens, columns and experts than one block takes.
    x = torch.randint(-128, 128, (130, 270)).bfloat16().requires_grad_()
    router_ED = torch.randint(-128, 128, (experts, 270)).to(router).requires_grad_()
    dlogits_TE = torch.eye(experts)[torch.randint(experts, (130,))]
    logits_TE = kernels(x, router_ED)
    logits_TE.backward(dlogits_TE)
    exact_x, exact_router = x.detach().double(), router_ED.detach().double()
    assert torch.equal(logits_TE.double(), exact_x @ exact_router.T)
    assert torch.equal(x.grad.double(), dlogits_TE.double() @ exact_router)
    # To the dtype of the router by one rounding, which may be down.
    rounding = 0.0 if router == torch.float32 else torch.finfo(router).eps
    expected_ED = dlogits_TE.double().T @ exact_x
    torch.testing.assert_close(router_ED.grad.double(), expected_ED, rtol=rounding, atol=0.0)


def _both(x, router):
    """A layer that uses ``x`` twice more."""
    logits_TE, x_TD = router_logits_and_x(x, router)
    return logits_TE, 2 * x_TD, x_TD.sin()


def _both_separately(x, router):
    return router_logits(x, router), 2 * x, x.sin()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "T{}-D{}-E{}".format(*s))
def test_the_gradient_passed_back_is_added(kernels, shape):
    inputs = _inputs(shape, torch.float32)
    run_in = []
    for implementation, run in (("triton", _both), ("reference", _both_separately)):
        with dispatch.force(moe_router=implementation):
            run_in.append(results(run, inputs, torch.bfloat16))
    with dispatch.force(moe_router="reference"):
        truth = results(_both_separately, inputs, torch.bfloat16, run_in=torch.float64)
    assert_within(*run_in, truth, torch.bfloat16)


def test_the_sum_of_both_gradients_is_rounded_once(kernels):
    x = torch.zeros(1, 16).bfloat16().requires_grad_()
    router = torch.full((1, 16), 1 + 2.0**-8)  # 1 in bf16
    with dispatch.force(moe_router="triton"):
        logits_TE, x_TD = router_logits_and_x(x, router)
    torch.autograd.backward((logits_TE, x_TD), (torch.ones(1, 1), -torch.ones_like(x)))
    assert torch.equal(x.grad, torch.full_like(x, 2.0**-8))


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_logits_and_x_alone(kernels, used):
    inputs = _inputs((9, 16, 4), torch.float32)
    found = []
    for run in (_both, _both_separately):
        x, router = (tensor.clone().requires_grad_() for tensor in inputs.values())
        with dispatch.force(moe_router="triton"):
            run(x, router)[used].sum().backward()
        found.append((x.grad, router.grad))
    (x_grad, router_grad), (expected_x, expected_router) = found
    assert torch.equal(x_grad, expected_x)
    assert used == 1 or torch.equal(router_grad, expected_router)
    assert (router_grad is None) == (expected_router is None) == (used == 1)


def test_x_that_asks_for_no_gradient_is_passed_on_as_it_is(kernels):
    inputs = _inputs((9, 16, 4), torch.float32)
    with dispatch.force(moe_router="triton"):
        logits_TE, x = router_logits_and_x(inputs["x"], inputs["router"].requires_grad_())
    assert x is inputs["x"]
    assert logits_TE.requires_grad


def test_checkpointed_layers_give_the_same_gradients(kernels):
    inputs, grads = _inputs((9, 16, 4), torch.float32), []
    for run in (_both, lambda x, router: checkpoint(_both, x, router, use_reentrant=False)):
        with dispatch.force(moe_router="triton"):
            grads.append(results(run, inputs, torch.bfloat16))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_logits_and_x_compile(kernels):
    # Compiled, autograd adds the gradients of x.
    def cast(function):
        def run(x, router):
            with dispatch.force(moe_router="triton"):
                return function(x.bfloat16(), router.float())

        return run

    torch._dynamo.reset()
    compiled = torch.compile(cast(_both), fullgraph=True, backend="aot_eager")
    inputs = {"x": torch.randn(9, 16), "router": torch.randn(4, 16)}
    assert_budget(compiled, cast(_both_separately), inputs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_other_tokens_get_plain_products(dtype):
    x, router = torch.randn(9, 16).to(dtype), torch.randn(4, 16)
    wide = torch.promote_types(dtype, torch.float32)
    dispatch.reset_counts()
    assert torch.equal(router_logits(x, router), x.to(wide) @ router.to(wide).T)
    assert dispatch.counts() == {("moe_router", "reference"): 1}


def test_zero_tokens(kernels):
    x = torch.empty(0, 16, dtype=torch.bfloat16, requires_grad=True)
    router = torch.randn(4, 16, requires_grad=True)
    logits = kernels(x, router)
    logits.sum().backward()
    assert logits.shape == (0, 4)
    assert x.grad.shape == x.shape
    assert torch.equal(router.grad, torch.zeros(4, 16))


def test_strided_inputs(kernels):
    inputs = _inputs((63, 40, 8), torch.float32)
    strided = {name: t.T.contiguous().T for name, t in inputs.items()}
    assert torch.equal(kernels(**strided), kernels(**inputs))


def test_nothing_is_left_unwritten(kernels, poisoned):
    named = results(kernels, _inputs((130, 33, 20), torch.float32), torch.bfloat16)
    assert all(tensor.isfinite().all() for tensor in named.values())


def test_runs_are_bitwise_equal(kernels):
    inputs = _inputs((257, 40, 8), torch.float32)
    first, second = (results(kernels, inputs, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_the_gradients_asked_for(kernels):
    inputs = _inputs((9, 16, 4), torch.float32)
    router = inputs["router"].requires_grad_()
    kernels(inputs["x"], router).sum().backward()
    torch.testing.assert_close(router.grad, inputs["x"].float().sum(0).expand(4, 16))


def test_autocast_does_not_apply():
    x, router = torch.randn(9, 16), torch.randn(4, 16)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        logits = router_logits(x, router)
    assert torch.equal(logits, x @ router.T)


def test_compiles(kernels):
    def run(x, router):  # the kernels see bf16, also in the run that gives the truth
        return kernels(x.bfloat16(), router.float())

    assert_compiles(run, {"x": torch.randn(9, 16), "router": torch.randn(4, 16)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.randn(2, 3, 8)}, r"x has shape \(2, 3, 8\)"),
        ({"router": torch.randn(4, 9)}, r"router has shape \(4, 9\), expected \(any, 8\)"),
        ({"x": torch.ones(3, 8, dtype=torch.int64)}, "x has dtype torch.int64"),
        ({"router": torch.ones(4, 8, device="meta")}, "router on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    given = {"x_TD": torch.randn(3, 8), "router_ED": torch.randn(4, 8)}
    names = {"x": "x_TD", "router": "router_ED"}
    with pytest.raises(ShapeError, match=message):
        router_logits(**{**given, **{names[name]: value for name, value in arguments.items()}})
