"""The ops beside their peers: floors, gate, rows."""

import json
from collections.abc import Callable

import pytest
import torch

from slipstream.bench import ops as bench
from slipstream.bench import ops_list
from slipstream.bench.environment import environment
from slipstream.bench.ops import OpsRequest, Yardstick, bench_case, bench_ops
from slipstream.bench.ops_case import Missing, OpCase, OpShape, parse_shape
from slipstream.bench.ops_figures import Rates, figures, reemission_row
from slipstream.bench.ops_list import OPS, select, shapes_of
from slipstream.bench.ops_peers import PEERS, peer_version
from slipstream.bench.ops_peers import select as select_peers
from slipstream.bench.ops_rope import heads_of
from slipstream.bench.ops_run import Runner, Tensors, storage_bytes
from slipstream.bench.results import Row
from slipstream.bench.timing import Quantiles, Timing
from slipstream.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = OpShape(tokens=64, width=48, vocabulary=96)
FIGURES = {"n", "forward_ms", "backward_ms", "total_ms", "total_copy_share", "copy_gb_per_s"}


def request(peers: list[str], ops: list[str] | None = None) -> OpsRequest:
    return OpsRequest(
        ops=ops or list(OPS),
        shapes=[SHAPE],
        peers=peers,
        dtype=torch.bfloat16,
        device=CPU,
        warmup=1,
        repetitions=2,
    )


def measure(case: OpCase, peers: list[str]) -> list[Row]:
    yardstick = Yardstick(CPU, torch.bfloat16)
    rows = bench_case(request(peers), case, yardstick, environment(CPU), lambda text: None)
    return [json.loads(json.dumps(row)) for row in rows]


def norm_with(**peers: Callable) -> OpCase:
    case = OPS["norm"].make(SHAPE, 2)
    made = {name: (lambda function=function: function) for name, function in peers.items()}
    return OpCase(
        op="norm",
        sizes=case.sizes,
        inputs=case.inputs,
        plain=case.plain,
        peers=case.peers | made,
        floor=case.floor,
        wanted=case.wanted,
    )


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        # T = 10, D = F = 6 in 16 bits: 120 bytes a tensor, 40 bytes a statistic of every row.
        ("norm", 2 * 120 + 40, 3 * 120 + 40),
        ("add-norm", 4 * 120 + 40, 4 * 120 + 40),
        ("gelu-norm", 2 * 120 + 80, 3 * 120 + 80),
        ("layernorm", 2 * 120 + 80, 3 * 120 + 80),
        ("swiglu", 3 * 120, 5 * 120),
        ("swiglu-fused", 3 * 120, 5 * 120),
        ("geglu", 3 * 120, 5 * 120),
        ("gelu", 2 * 120, 3 * 120),
        # 3 heads of 2 features, 1 key head: 40 bytes a head; tables of 10 x 1 in fp32, twice.
        ("rope", 2 * 4 * 40 + 80, 2 * 4 * 40 + 80),
        ("rope-qk-norm", 2 * 4 * 40 + 80, (3 * 3 + 5) * 40 + 80),
        # 32 tensors of 2 x 6.
        ("adamw-master", 28 * 384, 0),
        ("adamw-fp32", 28 * 384, 0),
        ("adamw-bf16", 14 * 384, 0),
    ],
)
def test_floors_count_every_byte_once(op: str, forward: int, backward: int) -> None:
    floor = OPS[op].make(OpShape(tokens=10, width=6), 2).floor
    assert (floor.forward_bytes, floor.backward_bytes) == (forward, backward)
    assert floor.forward_flops == 0


@pytest.mark.parametrize(
    ("op", "product"),
    [
        ("linear-cross-entropy", 2 * 10 * 48 * 7),
        ("norm-linear", 2 * 10 * 48 * 48),
        ("activation-linear", 2 * 10 * 48 * 16),
    ],
)
def test_products_are_counted_in_flops(op: str, product: int) -> None:
    case = OPS[op].make(OpShape(tokens=10, width=48, vocabulary=7), 2)
    assert (case.floor.forward_flops, case.floor.backward_flops) == (product, 2 * product)
    assert case.floor.forward_bytes == 0
    if case.reemission is not None:
        assert case.reemission.written_bytes == 10 * 48 * 2


def test_every_op_of_every_eager_peer_passes_its_gate() -> None:
    rows = list(bench_ops(request(["slipstream", "slipstream-keep", "eager", "torch"]), print))
    assert list(dict.fromkeys(row["op"] for row in rows)) == list(OPS)
    for row in rows:
        native_missing = row["reason"] if row["status"] == "absent" else ""
        assert row["status"] == "ok" or "has no linear_cross_entropy" in native_missing, row
    assert sum(row["peer"] == "slipstream" for row in rows) == len(OPS)
    for row in rows:
        json.dumps(row)
        if row["op"].startswith("adamw"):
            assert "forward_ms" not in row
            assert row["total_bytes"] == row["sizes"]["P"] * (14 if "bf16" in row["op"] else 28)
    reemitting = [row["op"] for row in rows if "reemission" in row]
    assert reemitting == ["norm-linear", "activation-linear"]


def test_a_row_holds_its_figures_and_where_they_come_from() -> None:
    (row,) = measure(OPS["norm"].make(SHAPE, 2), ["slipstream"])
    assert row["status"] == "ok"
    assert row["shape"] == "T64-D48"
    assert row["n"] == row["total_ms"]["n"] == 2
    assert row["implementations"] == ["norm=reference"]
    assert set(row["error"]) == {"output 0", "gradient of x", "gradient of weight"}
    for part, tensors in (("forward", 2), ("backward", 3), ("total", 5)):
        statistics = 2 if part == "total" else 1
        moved = 64 * (48 * 2 * tensors + 4 * statistics)
        assert row[f"{part}_bytes"] == moved
        share = moved / (row[f"{part}_ms"]["median"] / 1e3) / (row["copy_gb_per_s"] * 1e9)
        assert row[f"{part}_copy_share"] == pytest.approx(share, rel=2e-3)
    gap = row["total_ms"]["median"] - row["forward_ms"]["median"] - row["backward_ms"]["median"]
    assert row["sum_gap_ms"] == pytest.approx(gap, abs=3e-4)
    assert {"device", "torch", "triton", "commit", "date", "warmup"} <= row.keys()


def test_a_peer_that_is_wrong_fails_or_is_absent_has_no_figures() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 1.02 * torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for\nthis")

    def absent() -> Callable:
        raise Missing("it is not here")

    case = norm_with(torch=wrong, compiled=broken)
    case.peers["liger"] = absent
    rows = measure(case, ["eager", "compiled", "torch", "liger"])
    assert [row["status"] for row in rows] == ["ok", "failed", "wrong", "absent"]
    assert rows[1]["reason"] == "RuntimeError: no kernel for this"
    assert "output 0: max error" in rows[2]["reason"]
    assert rows[3]["reason"] == "it is not here"
    for row in rows[1:]:
        assert not FIGURES & row.keys()


def test_a_peer_that_writes_over_its_inputs_does_not_change_what_others_get() -> None:
    def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
        x.data.zero_()
        return y

    case = norm_with(torch=in_place)
    tensors = Tensors(case, torch.bfloat16, CPU)
    drawn = tensors.inputs["x"].detach().clone()
    for _, (call, before) in Runner(function=in_place, tensors=tensors).variants().items():
        before()
        call()
    assert not tensors.inputs["x"].any()
    tensors.restore()
    assert torch.equal(tensors.inputs["x"], drawn)


def test_a_backward_is_timed_without_its_forward() -> None:
    calls = []

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append("forward")
        return x * weight

    case = norm_with()
    variants = Runner(function=noted, tensors=Tensors(case, torch.float32, CPU)).variants()
    assert list(variants) == ["forward", "backward", "total"]
    call, before = variants["backward"]
    before()
    assert calls == ["forward"]
    dx, dweight = call()
    assert calls == ["forward"]
    assert (dx.shape, dweight.shape) == ((64, 48), (48,))


def timing(ms: float, spread: float = 0.0) -> Timing:
    found = Quantiles(n=3, median=ms, p10=ms - spread, p90=ms + spread)
    return Timing(device_ms=found, host_ms=found)


@pytest.mark.parametrize(
    ("total", "spread", "sums"), [(5.0, 0.0, True), (5.3, 0.0, False), (5.3, 0.2, True)]
)
def test_a_total_that_is_not_its_parts_shows(total: float, spread: float, sums: bool) -> None:
    case = OPS["norm"].make(SHAPE, 2)
    rates = Rates(bytes_per_s=1e6, flops_per_s=1e9)
    times = {"forward": timing(2.0, spread), "backward": timing(3.0), "total": timing(total)}
    row = figures(case, times, rates, CPU)
    assert row["sums"] is sums
    assert row["sum_gap_ms"] == pytest.approx(total - 5.0)
    assert row["forward_copy_share"] == pytest.approx(64 * (2 * 96 + 4) / 2e-3 / 1e6, rel=1e-3)


def test_the_loss_may_do_its_backward_in_the_forward_so_only_the_total_has_a_share() -> None:
    case = OPS["linear-cross-entropy"].make(SHAPE, 2)
    times = {"forward": timing(2.0), "backward": timing(1.0), "total": timing(3.0)}
    row = figures(case, times, Rates(bytes_per_s=1e9, flops_per_s=1e9), CPU)
    assert "forward_product_share" not in row
    assert row["total_product_share"] == pytest.approx(6 * 64 * 48 * 96 / 3e-3 / 1e9, rel=1e-3)


def test_what_reemission_costs_is_the_difference_to_keeping() -> None:
    what = OPS["norm-linear"].make(SHAPE, 2).reemission
    assert what is not None
    parts = ("forward", "backward", "total")
    ours = {f"{p}_ms": {"median": ms} for p, ms in zip(parts, (1.0, 2.5, 3.5), strict=True)}
    keep = {f"{p}_ms": {"median": ms} for p, ms in zip(parts, (1.1, 2.25, 3.375), strict=True)}
    row = reemission_row(
        what,
        ours | {"saved_mib": 1.0},
        keep | {"saved_mib": 4.0},
        Rates(bytes_per_s=1e8, flops_per_s=1),
    )
    assert row["reemission"] == {
        "written_bytes": 64 * 48 * 2,
        "write_ms": round(1e3 * 64 * 48 * 2 / 1e8, 4),
        "extra_forward_ms": -0.1,
        "extra_backward_ms": 0.25,
        "extra_total_ms": 0.125,
        "freed_mib": 3.0,
    }


def test_heads_of_awkward_widths() -> None:
    assert heads_of(4096) == (32, 8, 128)
    assert heads_of(5120) == (40, 10, 128)
    assert heads_of(3000) == (25, 5, 120)
    assert heads_of(6) == (3, 1, 2)


def test_views_of_one_memory_count_once() -> None:
    memory = torch.empty(100, dtype=torch.uint8)
    assert list(storage_bytes([memory[:10], memory[50:], memory]).values()) == [100]


def test_ops_and_peers_by_name() -> None:
    assert select([]) == list(OPS)
    assert select(["adamw"]) == ["adamw-master", "adamw-fp32", "adamw-bf16"]
    assert select(["gelu", "add_norm"]) == ["add-norm", "gelu"]
    with pytest.raises(ConfigError, match=r"--op norms: there are norm, add-norm"):
        select(["norms"])
    assert select_peers("all,-liger") == [name for name in PEERS if name != "liger"]
    with pytest.raises(ConfigError, match=r"--peers ligr: there are all, slipstream"):
        select_peers("ligr")
    with pytest.raises(ConfigError, match="nothing left to measure"):
        select_peers("liger,-liger")
    assert peer_version("eager") == torch.__version__


def test_shapes_given_quick_or_the_grid() -> None:
    assert parse_shape("8,16") == OpShape(tokens=8, width=16)
    assert parse_shape("8,16,32").vocabulary == 32
    for text in ("8", "8,x", "0,4", "1,2,3,4"):
        with pytest.raises(ConfigError, match="expected T,D or T,D,V"):
            parse_shape(text)
    assert shapes_of("norm", [SHAPE], quick=True) == [SHAPE]
    assert len(shapes_of("norm", [], quick=True)) == 1
    grid = shapes_of("swiglu", [], quick=False)
    assert {(s.tokens, s.width) for s in grid} == {
        (t, f) for t in (8192, 16384) for f in (5632, 14336, 11000)
    }
    assert ops_list.FEW["loss"][0] == OpShape(tokens=16384, width=4096, vocabulary=128256)
    assert OpShape(tokens=16384, width=1).sequence == 4096
    assert OpShape(tokens=100, width=1).sequence == 100


def test_the_yardstick_counts_a_copy_twice() -> None:
    yardstick = Yardstick(CPU, torch.float32)
    rates = yardstick.rates({"copy": timing(2.5, spread=0.5), "product": timing(4.0, spread=0.5)})
    # The fastest tenth of the copies, which some take longer.
    assert rates.bytes_per_s == 2 * bench.COPY_BYTES["cpu"] / 2e-3
    assert rates.flops_per_s == 2 * bench.PRODUCT["cpu"] ** 3 / 4e-3
