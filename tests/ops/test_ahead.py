"""Kernels compiled ahead: that they are those the ops launch, and how launches wait for them."""

import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.ops import ahead, moe
from slipstream.ops.moe.experts import fused, tuned
from slipstream.ops.moe.route import autograd as route_autograd
from slipstream.ops.moe.router import autograd as router_autograd
from tests.ops.implementations import forced
from tests.ops.triton_standins import Driver, Kernel, aligned, install

launching = pytest.importorskip("slipstream.ops.launching")
passes = pytest.importorskip("slipstream.ops.moe.experts.passes")
experts_launch = pytest.importorskip("slipstream.ops.moe.experts.launch")
route_launch = pytest.importorskip("slipstream.ops.moe.route.launch")
router_launch = pytest.importorskip("slipstream.ops.moe.router.launch")
LONG = 60.0
"""Seconds after which a thread that waits for another fails."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 4)
    return install(monkeypatch)


def _launch(kernel: Kernel, x: torch.Tensor, width: int = 8) -> None:
    launching.launch(kernel, (1,), x, None, 33, 1.5, WIDTH=width)


def _plan(*kernels: Kernel) -> Any:
    def function(x: torch.Tensor) -> None:
        for kernel in kernels:
            _launch(kernel, x)

    return ahead.expecting(function, aligned(8))


def test_what_an_op_expects_is_compiled_at_once_in_other_threads(gpu):
    kernels, threads, together = [Kernel() for _ in range(3)], [], threading.Barrier(3)
    for kernel in kernels:
        kernel.compiling = lambda: (together.wait(LONG), threads.append(threading.get_ident()))
    with _plan(*kernels):
        _launch(kernels[0], aligned(8))
    for kernel in kernels[1:]:
        _launch(kernel, aligned(16))
        (compiled,) = kernel.device_caches[0][0].values()
        threads.append(compiled.module)  # where its launcher was built
    assert len(set(threads)) == 3
    assert threading.get_ident() not in threads
    for kernel in kernels:
        assert kernel.searches == 0
        (driven,) = kernel.driven
        assert driven[-6] is not None
        assert not driven[-6].is_meta


def test_a_launch_waits_for_its_own_kernel_only(gpu):
    first, other, launched = Kernel(), Kernel(), threading.Event()
    late: list[bool] = []
    other.compiling = lambda: late.append(launched.wait(LONG))
    with _plan(first, other):
        _launch(first, aligned(8))
    launched.set()
    _launch(other, aligned(8))
    assert late == [True]
    assert len(first.driven) == len(other.driven) == 1


def test_only_the_first_missing_kernel_asks(gpu):
    known, other, runs = Kernel(), Kernel(), []

    def function(x: torch.Tensor) -> None:
        runs.append(x.device.type)
        _launch(known, x)
        _launch(other, x)

    for _ in range(3):
        with ahead.expecting(function, aligned(8)):
            _launch(known, aligned(8))
            _launch(other, aligned(8))
    assert runs == ["meta"]
    assert known.searches == other.searches == 0
    assert [len(k.device_caches[0][0]) for k in (known, other)] == [1, 1]


def test_what_the_plan_left_out_is_compiled_at_its_launch(gpu):
    kernel, runs = Kernel(), []

    def function(x: torch.Tensor) -> None:
        runs.append(x)
        _launch(kernel, x)

    with ahead.expecting(function, aligned(8)):
        _launch(kernel, aligned(8))
        _launch(kernel, aligned(8), width=16)
    _launch(kernel, aligned(8), width=16)
    assert kernel.searches == len(runs) == 1
    assert len(kernel.driven) == 3


def test_a_call_that_is_left_to_triton_is_not_expected(gpu):
    kernel, other = Kernel(), Kernel()

    def function(x: torch.Tensor) -> None:
        launching.launch(other, (1,), x, None, True, 1.5, WIDTH=8)
        _launch(kernel, x)

    with warnings.catch_warnings(), ahead.expecting(function, aligned(8)):
        warnings.simplefilter("error")
        _launch(kernel, aligned(8))
        launching.launch(other, (1,), aligned(8), None, True, 1.5, WIDTH=8)
    assert (kernel.warmups, kernel.searches) == (1, 0)
    assert (other.warmups, other.searches) == (0, 1)


def test_a_kernel_is_compiled_ahead_once_however_often_it_is_expected(gpu):
    kernel, other = Kernel(), Kernel()
    with _plan(kernel, kernel):
        _launch(kernel, aligned(8))
    with _plan(other, kernel):
        _launch(other, aligned(8))
    assert kernel.warmups == other.warmups == 1


def test_kernels_are_hashed_in_the_order_of_launches_before_one_is_compiled(gpu):
    events: list[Any] = []

    class Hashed(Kernel):
        def __hash__(self) -> int:
            events.append(self)
            return super().__hash__()

    kernels = [Hashed() for _ in range(4)]
    for kernel in kernels:
        kernel.compiling = lambda: events.append("compiled")
    with _plan(*kernels):
        _launch(kernels[0], aligned(8))
    for kernel in kernels:
        _launch(kernel, aligned(8))
    assert [id(event) for event in events[:4]] == [*map(id, kernels)]
    assert events[4:].count("compiled") == 4


def test_kernels_are_compiled_for_the_device_of_the_launch(gpu):
    kernel, other = Kernel(), Kernel()
    gpu.device = 1
    with _plan(kernel, other):
        _launch(kernel, aligned(8))
    _launch(other, aligned(8))
    for one in (kernel, other):
        stream, handle = one.driven[0][3:5]
        assert stream == gpu.stream + 1
        assert handle.startswith("1: ")
        assert one.searches == 0


def test_a_kernel_that_fails_to_compile_ahead_is_named_and_fails_at_its_own_launch(gpu):
    good, bad, threads = Kernel(), Kernel(), []

    def fail() -> None:
        threads.append(threading.get_ident())
        raise ValueError("no registers left")

    bad.compiling = fail
    with warnings.catch_warnings(), _plan(good, bad):
        warnings.simplefilter("error")
        _launch(good, aligned(8))
    with (
        pytest.warns(RuntimeWarning, match="compiled ahead.*ValueError: no registers left"),
        pytest.raises(ValueError, match="no registers left"),
    ):
        _launch(bad, aligned(8))
    assert threads[1:] == [threading.get_ident()] != threads[:1]
    bad.compiling = lambda: None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _launch(bad, aligned(8))
    assert len(bad.driven) == 1


def test_a_plan_that_fails_is_named_and_the_launch_is_as_ever(gpu):
    kernel = Kernel()

    def function(x: torch.Tensor) -> None:
        _launch(kernel, x)
        x.item()

    with (
        pytest.warns(RuntimeWarning, match="test_ahead launches could not be compiled ahead"),
        ahead.expecting(function, aligned(1)),
    ):
        _launch(kernel, aligned(8))
    assert kernel.searches == 1
    assert len(kernel.driven) == 1


@pytest.mark.parametrize("case", ["one processor", "capture", "interpreter"])
def test_where_nothing_is_compiled_ahead(gpu, monkeypatch, case):
    kernel, other = Kernel(), Kernel()
    if case == "one processor":
        monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    elif case == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setattr(launching, "interpreting", lambda: True)
    with _plan(kernel, other):
        _launch(kernel, aligned(8))
    assert kernel.searches == 1
    assert not other.device_caches[0][0]


def test_a_plan_ends_with_its_op(gpu):
    kernel, other = Kernel(), Kernel()
    with pytest.raises(KeyError), _plan(kernel, other):
        raise KeyError
    _launch(kernel, aligned(8))
    assert kernel.searches == 1
    assert not other.device_caches[0][0]


def _kind(arg: Any) -> Any:
    """What Triton specialises on, but for addresses."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype
    if isinstance(arg, launching.Descriptor):
        return arg.base.dtype, *arg.block_shape
    return (arg == 1, arg % 16 == 0) if isinstance(arg, int) else type(arg)


class Recorder:
    """Notes launches, real ones and those of dry runs, and the plans of ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real: set[Any] = set()
        self.dry: set[Any] = set()
        self.real_launch = launching.launch
        for module in (experts_launch, route_launch, router_launch):
            monkeypatch.setattr(module, "launch", self.launch)
        for module in (fused, route_autograd, router_autograd):
            monkeypatch.setattr(module, "expecting", self.expecting)
        if torch.get_default_device().type == "cpu":
            # The interpreter has its own tiles and blocks, and there is no current GPU.
            monkeypatch.setattr(tuned, "capability_of", lambda _: tuned.INTERPRETER)
            monkeypatch.setattr(experts_launch, "_together", lambda _: 64)

    def launch(self, kernel: Any, grid: Any, /, *args: Any, **constants: Any) -> None:
        call = kernel.fn.__name__, *map(_kind, args), *constants.items()
        runs_dry = ahead.local.calls is not None
        (self.dry if runs_dry else self.real).add(call)
        if not runs_dry:
            self.real_launch(kernel, grid, *args, **constants)

    def expecting(self, function: Any, *args: Any) -> Any:
        if "all_launches" in function.__name__:
            ahead.local.calls = []
            function(*ahead._without_memory(args))
            ahead.local.calls = None
        return nullcontext()


E, D, F, K, T = 4, 32, 48, 2, 40
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "save-x": {"save": "x"},
    "bias": {"bias": True, "activation": "relu2"},
    "transposed": {"transposed": True},
    "accumulate": {"accumulate": True},
    "frozen": {"frozen": True},
    "inference": {"grad": False},
    "interleaved": {"interleaved": True},
    "extras": {"extras": True},
    "aux": {"route": {"aux": "batch"}},
    "sequences": {"route": {"aux": "sequence", "num_sequences": 2}},
    "balanced": {"balance": True},
    "odd": {"tokens": 33},
    "one": {"tokens": 1},
}


def _layer(
    *,
    bias: bool = False,
    transposed: bool = False,
    accumulate: bool = False,
    frozen: bool = False,
    grad: bool = True,
    extras: bool = False,
    balance: bool = False,
    tokens: int = T,
    route: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """One forward and backward of the ops in the order of ``nn.MoE``."""
    dtype = torch.float16  # the interpreter multiplies bf16 wrongly, but not in the router
    rows = F if options.get("activation") == "relu2" else 2 * F
    x_TD = torch.randn(tokens, D, dtype=torch.bfloat16, requires_grad=grad)
    router_ED = torch.randn(E, D, requires_grad=grad)
    w13, w2 = torch.randn(E, rows, D, dtype=dtype), torch.randn(E, D, F, dtype=dtype)
    if transposed:
        w13, w2 = (w.mT.contiguous().mT for w in (w13, w2))
    for weight in (w13, w2):
        weight.requires_grad_(grad and not frozen)
    if bias:
        options["b13_EP"] = torch.randn(E, rows, dtype=dtype, requires_grad=grad)
        options["b2_ED"] = torch.randn(E, D, dtype=dtype, requires_grad=grad)
    if accumulate:
        options["accumulate"] = torch.zeros(E, rows, D), torch.zeros(E, D, F)
    if extras:
        options["residual_TD"] = torch.randn(tokens, D, dtype=dtype)
        options["shared_TD"] = torch.randn(tokens, D, dtype=dtype)
    balancing: dict[str, Any] = {}
    if balance:
        balancing = {"load_E": torch.full((E,), tokens * K / E), "threshold": torch.tensor(1.5)}
    logits_TE, x_TD = moe.router_logits_and_x(x_TD, router_ED)
    routing = moe.route(logits_TE, top_k=K, normalize=True, **balancing, **(route or {}))
    out = moe.moe_mlp(x_TD.to(dtype), w13, w2, routing, **options)
    if grad:
        (out.float().sum() + routing.aux_loss).backward()


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_of_the_layer_launches_what_the_layer_does(monkeypatch, name):
    recorder = Recorder(monkeypatch)
    with forced("moe_router", "triton"), forced("moe_route", "triton"), forced("moe_mlp", "triton"):
        _layer(**CASES[name])
    assert recorder.real == recorder.dry
    assert len(recorder.dry) >= (7 if name == "inference" else 13)


def test_without_memory_means_the_current_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(tuned, "lookup_all", lambda *args: asked.append(args[1]))
    x_TD, w2_EDF = torch.empty(T, D, device="meta"), torch.empty(E, D, F, device="meta")
    passes._tiles(("up",), x_TD, SimpleNamespace(num_rows=T * K), w2_EDF)
    assert asked == [torch.device("cuda")]
    assert experts_launch._together(x_TD) == 1
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert experts_launch._precision(x_TD) == "tf32"
