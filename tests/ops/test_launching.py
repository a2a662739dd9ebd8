"""When a compiled kernel is called again without Triton's search: the driver is told the same.

Triton's own code binds, specialises and launches here; see ``triton_standins``.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.triton_standins import Driver, Kernel, aligned, descriptor, install

launching = pytest.importorskip("slipstream.ops.launching")
knobs = pytest.importorskip("triton.knobs")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


X = aligned(8)
TENSORS = {
    "fp32": X,
    "another": aligned(24),
    "bf16": aligned(8, torch.bfloat16),
    "fp8": aligned(8, torch.float8_e4m3fn),
    "int64": aligned(8, torch.int64),
    "bool": aligned(8, torch.bool),
    "parameter": torch.nn.Parameter(aligned(8)),
    "view": aligned(8).view(2, 4).mT,
    "empty": torch.empty(0),
    "unaligned": aligned(8, shift=1),
    "none": None,
    "blocks of 8": descriptor(torch.bfloat16, 8),
    "blocks of 16": descriptor(torch.bfloat16, 16),
    "fp32 blocks of 8": descriptor(torch.float32, 8),
}
NUMBERS = [0, 1, 2, -1, 15, 16, 17, 32, -16, True, False, 1.0, 0.5, float("inf")]
NUMBERS += [2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, 2**63 - 1, 2**63]
CONSTANTS = [1, 8, "silu", None, torch.float32, (1, 2)]
OPTIONS = [{}, {"num_warps": 8}, {"num_stages": 1}, {"launch_cooperative_grid": True}]

args = st.fixed_dictionaries(
    {
        "x": st.sampled_from(sorted(TENSORS)),
        "bias": st.sampled_from(sorted(TENSORS)),
        "rows": st.sampled_from(NUMBERS) | st.integers(-(2**33), 2**33),
        "scale": st.sampled_from(NUMBERS) | st.floats(),
        "width": st.sampled_from(CONSTANTS),
        "block": st.sampled_from(CONSTANTS),
        "options": st.sampled_from(OPTIONS),
        "device": st.integers(0, 1),
        "stream": st.integers(7, 8),
        "debug": st.booleans(),
        "mode": st.sampled_from(["", "fpsan"]),
    }
)
USUAL: dict[str, Any] = {
    "x": "fp32", "bias": "none", "rows": 33, "scale": 1.5, "width": 8, "block": 4, "options": {},
    "device": 0, "stream": 7, "debug": False, "mode": "",
}  # fmt: skip


def _both(kernel: Kernel, gpu: Driver, call: dict[str, Any]) -> int:
    """The same call as Triton launches it and by ``launch``; how often the latter searched."""
    c = USUAL | call
    gpu.device, gpu.stream = c["device"], c["stream"]
    given = TENSORS[c["x"]], TENSORS[c["bias"]], c["rows"], c["scale"]
    constants = {"BLOCK": c["block"], "WIDTH": c["width"], **c["options"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "debug", c["debug"])
        patch.setattr(knobs.compilation, "instrumentation_mode", c["mode"])
        kernel.driven.clear()
        kernel[(5, 3)](*given, **constants)
        searches = kernel.searches
        launching.launch(kernel, (5, 3), *given, **constants)
    # What is told apart: grid, stream, handle and options; then, for hooks, metadata and hooks.
    (wanted, got) = (driven[:6] + driven[9:] for driven in kernel.driven)
    for one, other in zip(wanted, got, strict=True):
        assert one is other or (type(one) is type(other) and repr(one) == repr(other))
    return kernel.searches - searches


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(args, min_size=2, max_size=12))
def test_the_driver_is_told_the_same_as_by_triton_whatever_came_before(calls):
    with pytest.MonkeyPatch.context() as patch:
        gpu, kernel = install(patch), Kernel()
        for call in [*calls, *calls]:
            _both(kernel, gpu, call)


@pytest.mark.parametrize("name", [n for n in TENSORS if n != "unaligned"])
def test_a_call_of_the_same_kind_is_made_without_a_search(gpu, name):
    kernel = Kernel()
    assert _both(kernel, gpu, {"x": name}) == 1
    assert _both(kernel, gpu, {"x": name}) == 0
    assert _both(kernel, gpu, {"x": name, "rows": 35, "scale": 1.0, "stream": 9}) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 1},
        {"rows": 48},
        {"width": 16},
        {"x": "bf16"},
        {"x": "blocks of 16"},
        {"x": "fp32 blocks of 8"},
        {"bias": "fp32"},
        {"options": {"num_warps": 8}},
        {"device": 1},
        {"debug": True},
        {"mode": "fpsan"},
    ],
    ids=lambda other: "-".join(f"{name} {value}" for name, value in other.items()),
)
def test_what_triton_tells_apart_is_searched_for(gpu, other):
    kernel = Kernel()
    first = {"x": "blocks of 8"} if "blocks" in str(other) else {}
    _both(kernel, gpu, first)
    assert _both(kernel, gpu, other) == 1
    assert _both(kernel, gpu, other) == 0
    assert _both(kernel, gpu, first) == 0


def test_kernels_are_told_apart(gpu):
    one, other = Kernel(), Kernel()
    for kernel in (one, other):
        assert _both(kernel, gpu, {}) == 1
        assert _both(kernel, gpu, {}) == 0


@pytest.mark.parametrize(
    "unusual", [{"x": "unaligned"}, {"rows": 2**31}, {"rows": True}], ids=["address", "i64", "bool"]
)
def test_the_unusual_is_left_to_triton_every_time(gpu, unusual):
    kernel = Kernel()
    assert [_both(kernel, gpu, unusual) for _ in range(3)] == [1, 1, 1]


def test_what_triton_does_not_specialise_on_may_be_searched_for_but_is_driven_alike(gpu):
    kernel = Kernel(do_not_specialize=["rows", "scale"])
    for rows in (1, 16, 33, 1, 16, 33):
        _both(kernel, gpu, {"rows": rows, "scale": rows})
    assert len(kernel.device_caches[0][0]) == 1


def test_the_interpreter_rocm_and_hooks_are_left_to_triton(gpu, monkeypatch):
    kernel, seen = Kernel(), []
    for target, name, value in (
        (launching, "interpreting", lambda: True),
        (torch.version, "hip", "6.4"),
        (kernel, "pre_run_hooks", [lambda *_, **__: seen.append(1)]),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "'x'")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert [_both(kernel, gpu, {}) for _ in range(3)] == [1, 1, 1], name
    assert len(seen) == 6


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_launch_hooks_are_told_every_launch(gpu, monkeypatch, name, chained):
    def hook(metadata: Any) -> None:
        """Triton's driver calls it; the stand-in only gets it."""

    kernel, chain = Kernel(), knobs.HookChain()
    monkeypatch.setattr(knobs.runtime, name, chain)
    _both(kernel, gpu, {})
    assert _both(kernel, gpu, {}) == 0
    assert kernel.driven[-1][6:9] == (None, None, None)
    if chained:
        chain.add(hook)
    else:
        monkeypatch.setattr(knobs.runtime, name, hook)
    assert _both(kernel, gpu, {}) == 0
    by_triton, by_launch = kernel.driven
    assert by_launch[7:9] == by_triton[7:9]
    assert by_launch[6].data == by_triton[6].data
    assert (chain if chained else hook) in by_launch[7:9]


def test_constants_come_last_and_by_name(gpu):
    with pytest.raises(AssertionError, match="constants come last"):
        launching.launch(Kernel(), (1,), X, None, 33, 1.5, 8)
    with pytest.raises(AssertionError, match="constants come last"):
        launching.launch(Kernel(), (1,), X, None, 33, scale=1.5, WIDTH=8)


def test_a_constant_left_out_is_the_default(gpu):
    kernel = Kernel()
    for _ in range(2):
        launching.launch(kernel, (1,), X, None, 33, 1.5, WIDTH=8)
    assert kernel.searches == 1
    for driven in kernel.driven:
        assert driven[-6:] == (X, None, 33, 1.5, 8, 4)
