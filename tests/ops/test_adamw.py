from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

from slipstream.errors import HardwareError, ShapeError
from slipstream.ops import AdamWOptions, adamw, dispatch
from slipstream.ops.adamw import _refuse_fused
from slipstream.ops.triton_support import interpreting
from tests.budget import Results, assert_within
from tests.ops.implementations import forced, runnable

SHAPES = [(63,), (8, 5), (1,), (257, 3)]
OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
STEPS = 10
IMPLEMENTATIONS = runnable("adamw")
SHORT = [torch.bfloat16, torch.float16]


def _state(params: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> dict:
    return {
        "exp_avgs": [torch.zeros_like(p, dtype=dtype) for p in params],
        "exp_avg_sqs": [torch.zeros_like(p, dtype=dtype) for p in params],
        "steps": [torch.zeros(()) for _ in params],
    }


def _params(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _grads(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _divisor(grads: list[torch.Tensor]) -> torch.Tensor:
    norm = torch.stack([g.double().norm() for g in grads]).norm()
    return norm.clamp(min=1.0).float()


def _named(params, exp_avgs, exp_avg_sqs) -> Results:
    groups = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    return {name: torch.cat([t.flatten() for t in group]) for name, group in groups.items()}


def _ours(name: str, dtype: torch.dtype, options: AdamWOptions = OPTIONS) -> Results:
    params = _params(dtype)
    state = _state(params, dtype)
    with forced("adamw", name):
        for step in range(STEPS):
            grads = _grads(step, dtype)
            adamw(params, grads, **state, options=options, grad_divisor=_divisor(grads))
    assert [int(step) for step in state["steps"]] == [STEPS] * len(SHAPES)
    return _named(params, state["exp_avgs"], state["exp_avg_sqs"])


def _torch(dtype: torch.dtype, options: AdamWOptions = OPTIONS, *, fused: bool = False) -> Results:
    params = [torch.nn.Parameter(p) for p in _params(dtype)]
    optimizer = torch.optim.AdamW(
        params,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
        fused=fused,
    )
    for step in range(STEPS):
        grads = _grads(step, dtype)
        divisor = _divisor(grads)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad / divisor
        optimizer.step()
    states = [optimizer.state[p] for p in params]
    moments = [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq")]
    return _named([p.detach() for p in params], *moments)


VARIED = {
    "plain": OPTIONS,
    "beta1-0": AdamWOptions(lr=1e-2, beta1=0.0, weight_decay=0.1),
    "beta2-0.999": AdamWOptions(lr=1e-3, beta2=0.999),
    "eps-1": AdamWOptions(lr=1e-2, eps=1.0),
}


def _need_rounding(implementation: str, dtype: torch.dtype) -> None:
    if implementation == "triton" and interpreting() and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bfloat16 wrongly")


@pytest.mark.parametrize("name", VARIED)
def test_reference_matches_torch_in_fp64(name):
    options = VARIED[name]
    actual, expected = _ours("reference", torch.float64, options), _torch(torch.float64, options)
    # PyTorch's tolerances for fp32: step counts are fp32, so the bias corrections are too.
    assert_close(actual, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stays_in_the_budget_of_torch_in_fp32(implementation, name):
    options = VARIED[name]
    assert_within(
        _ours(implementation, torch.float32, options),
        _torch(torch.float32, options, fused=implementation == "fused"),
        _torch(torch.float64, options),
        torch.float32,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_first_update_keeps_its_digits(implementation):
    # From zero weights, so that the update is not hidden behind the rounding of the weight.
    options = AdamWOptions(lr=1.0, beta2=0.999)
    updates = {}
    for name, dtype in (("truth", torch.float64), (implementation, torch.float32)):
        param = torch.zeros(257, dtype=dtype)
        grad = torch.linspace(-1, 1, 257).to(dtype)
        with forced("adamw", "reference" if name == "truth" else name):
            adamw([param], [grad], **_state([param], dtype), options=options)
        updates[name] = param.double()
    # A dozen fp32 operations; PyTorch's tolerance for fp32.
    assert_close(updates[implementation], updates["truth"], rtol=1.3e-6, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_low_precision_params_are_their_fp32_masters_rounded(dtype, implementation):
    _need_rounding(implementation, dtype)
    params = _params(dtype)
    masters = [p.float() for p in params]
    alone = [m.clone() for m in masters]
    state, state_alone = _state(params), _state(alone)
    with forced("adamw", implementation):
        for step in range(3):
            grads = _grads(step, dtype)
            wide = [g.float() for g in grads]
            adamw(params, grads, **state, options=OPTIONS, masters=masters)
            adamw(alone, wide, **state_alone, options=OPTIONS)
    for param, master, expected in zip(params, masters, alone, strict=True):
        assert torch.equal(master, expected)
        assert torch.equal(param, master.to(dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
def test_skip_changes_nothing_even_with_nan_gradients(masters, implementation):
    dtype = torch.float16 if masters else torch.float32
    params = _params(dtype)
    wide = [p.float() for p in params] if masters else None
    state = _state(params)
    adamw(params, _grads(0, params[0].dtype), **state, options=OPTIONS, masters=wide)
    tensors = [*params, *(wide or []), *state["exp_avgs"], *state["exp_avg_sqs"], *state["steps"]]
    before = [t.clone() for t in tensors]
    with forced("adamw", implementation):
        adamw(
            params,
            [torch.full_like(p, float("nan")) for p in params],
            **state,
            options=OPTIONS,
            masters=wide,
            grad_divisor=torch.tensor(float("nan")),
            skip=torch.tensor(True),
        )
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def _strided(layout: str) -> torch.Tensor:
    dense = torch.randn(6, 8)
    return {
        "transposed": lambda: dense.T,
        "sliced": lambda: dense[:, ::2],
        "contiguous": lambda: dense,
    }[layout]()


@pytest.mark.filterwarnings("ignore:adamw. fused is not used:RuntimeWarning")
@pytest.mark.parametrize("grad_layout", ["contiguous", "strided", "expanded"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_memory_layout_does_not_change_the_step(layout, grad_layout):
    param = _strided(layout)
    rows, columns = param.shape
    grad = {
        "contiguous": lambda: torch.randn(rows, columns),
        "strided": lambda: torch.randn(columns, rows).T,
        "expanded": lambda: torch.randn(rows, 1).expand(rows, columns),
    }[grad_layout]()
    dense, dense_grad = param.clone(memory_format=torch.contiguous_format), grad.contiguous()
    states = [
        {
            "exp_avgs": [torch.zeros(rows, columns)],
            "exp_avg_sqs": [torch.zeros(rows, columns)],
            "steps": [torch.zeros(())],
        }
        for _ in range(2)
    ]
    adamw([param], [grad], **states[0], options=OPTIONS)
    with dispatch.force(adamw="reference"):
        adamw([dense], [dense_grad], **states[1], options=OPTIONS)
    assert_close(param, dense)
    assert_close(states[0]["exp_avgs"], states[1]["exp_avgs"])


def test_a_strided_param_is_refused_by_the_fused_kernel_with_a_remedy():
    with torch.device("cpu"), dispatch.force(adamw="fused"):
        param = torch.randn(8, 6).T
        with pytest.raises(HardwareError, match="not contiguous"):
            adamw([param], [torch.ones(6, 8)], **_state([param]), options=OPTIONS)


@pytest.mark.parametrize(("device", "served"), [("cpu", True), ("cuda", False), ("xpu", False)])
def test_the_fused_kernel_serves_a_cpu_alone(device, served):
    with torch.device("cpu"):
        weight, scalar = torch.ones(3), torch.zeros(())
    # Stands for a tensor on that device.
    param = Mock(spec=torch.Tensor, wraps=weight, device=torch.device(device), dtype=weight.dtype)
    lists = [param], *([weight] for _ in range(3)), [scalar]
    refusal = _refuse_fused(*lists, None, scalar, scalar.bool(), OPTIONS)
    assert (refusal is None) == served
    if device == "cuda":
        assert "takes 1 - beta in fp32 from a rounded beta" in refusal.reason


def test_fp64_with_moments_of_another_dtype_is_served_by_the_reference():
    param = torch.randn(5, dtype=torch.float64)
    dispatch.reset_counts()
    adamw([param], [torch.ones(5)], **_state([param]), options=OPTIONS)
    assert dispatch.counts() == {("adamw", "reference"): 1}


def test_nothing_to_do():
    adamw([], [], [], [], [], options=OPTIONS)
    empty = torch.zeros(0)
    state = _state([empty])
    adamw([empty], [empty.clone()], **state, options=OPTIONS)
    assert state["steps"][0].item() == 1


def test_compiles():
    def step(params, grads, exp_avgs, exp_avg_sqs, steps, divisor, skip):
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            options=OPTIONS,
            grad_divisor=divisor,
            skip=skip,
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    final = []
    for run in (compiled, step):
        params = _params(torch.float32)
        state = _state(params)
        with dispatch.force(adamw="reference"):
            for i in range(2):
                grads = _grads(i, torch.float32)
                run(params, grads, **state, divisor=_divisor(grads), skip=torch.tensor(False))
        final.append(_named(params, state["exp_avgs"], state["exp_avg_sqs"]))
    assert_close(final[0], final[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grads": [torch.ones(4)]}, r"grad has shape \(4,\), expected \(3\)"),
        ({"exp_avgs": [torch.ones(4)]}, r"exp_avg has shape \(4,\)"),
        ({"exp_avg_sqs": [torch.ones(3, 1)]}, r"exp_avg_sq has shape \(3, 1\)"),
        ({"masters": [torch.ones(4)]}, r"master has shape \(4,\)"),
        ({"grads": []}, "differ in number"),
        ({"masters": []}, "differ in number"),
        ({"params": [torch.ones(3).bfloat16()]}, "16-bit params need fp32 masters"),
        ({"params": [torch.ones(3).long()]}, "param has dtype torch.int64"),
        ({"exp_avgs": [torch.ones(3).bfloat16()]}, "exp_avg is torch.bfloat16 beside a param of"),
        ({"steps": [torch.tensor(0)]}, "step is torch.int64 beside a param of torch.float32"),
        ({"masters": [torch.ones(3).half()]}, "master is torch.float16"),
        ({"options": replace(OPTIONS, lr=float("nan"))}, "options.lr = nan, expected a number of"),
        ({"options": replace(OPTIONS, beta1=1.0)}, r"options.beta1 = 1.0, expected a number in"),
        ({"options": replace(OPTIONS, eps=0.0)}, "options.eps = 0.0, expected a number above 0"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    params = [torch.ones(3)]
    valid = {"params": params, "grads": [torch.ones(3)], **_state(params)}
    with pytest.raises(ShapeError, match=message):
        adamw(**{**valid, "options": OPTIONS, **arguments})
