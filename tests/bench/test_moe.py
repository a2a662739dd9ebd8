"""The rows of a measurement: figures only for layers that pass."""

import dataclasses
import json

import pytest
import torch

from slipstream.bench.moe import MoeRequest, bench_moe
from slipstream.bench.moe_balance import BalanceRequest, bench_balance
from slipstream.bench.moe_peers import PEERS, Layer, Peer, select
from slipstream.bench.moe_problem import Problem, parse_shape
from slipstream.bench.moe_table import moe_tables
from slipstream.bench.results import Row
from slipstream.errors import ConfigError

CPU = torch.device("cpu")
NO_FIGURES = {"forward_ms", "total_ms", "total_tflop_per_s", "n"}
EAGER = "slipstream,slipstream-save-x,grouped_mm-eager,transformers-grouped_mm,transformers-eager"


def measure(peers: list[Peer], skew: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> list[Row]:
    request = MoeRequest(
        shapes=[parse_shape("65,32,16,5,2")],
        skews=[skew],
        peers=peers,
        dtype=dtype,
        device=CPU,
        warmup=1,
        repetitions=2,
    )
    return [json.loads(json.dumps(row)) for row in bench_moe(request, lambda text: None)]


def wrong(problem: Problem) -> Layer:
    layer = PEERS["slipstream"].build(problem)
    return dataclasses.replace(layer, forward=lambda: layer.forward() * 1.1)


def broken(problem: Problem) -> Layer:
    raise RuntimeError(f"no kernel for\n{problem.shape.experts} experts")


@pytest.mark.parametrize("skew", [0.0, 1.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_eager_peer_does_the_same_work(skew: float, dtype: torch.dtype) -> None:
    rows = measure(select(EAGER), skew, dtype)
    assert [row["peer"] for row in rows] == EAGER.split(",")
    for row in rows:
        assert row["status"] == "ok", row
        assert row["bitwise"]
        assert row["n"] == row["total_ms"]["n"] == 2
        rate = 18 * 65 * 2 * 16 * 32 / row["total_ms"]["median"] / 1e9
        assert row["total_tflop_per_s"] == pytest.approx(rate, rel=1e-2)
        total, forward = row["total_ms"]["median"], row["forward_ms"]["median"]
        assert row["backward_ms"]["median"] == pytest.approx(total - forward, abs=2e-4)
        assert len(row["error"]) == 5
        assert row["skew"] == skew
        assert {"device", "driver", "torch", "triton", "commit", "date", "warmup"} <= row.keys()
    assert any(used.startswith("moe_mlp=") for used in rows[0]["implementations"])
    assert "implementations" not in rows[2]


def test_a_wrong_peer_has_no_figures() -> None:
    rows = measure([PEERS["slipstream"], Peer(name="wrong", build=wrong)])
    assert [row["status"] for row in rows] == ["ok", "wrong"]
    assert "output: max error" in rows[1]["reason"]
    assert not NO_FIGURES & rows[1].keys()
    assert rows[0].keys() >= NO_FIGURES


def test_a_peer_that_fails_or_is_absent_says_why_and_the_others_are_measured() -> None:
    rows = measure(
        [
            Peer(name="broken", build=broken),
            Peer(name="away", build=broken, module="no_such_module_anywhere"),
            Peer(name="elsewhere", build=broken, cuda_only=True),
            PEERS["slipstream"],
        ]
    )
    assert [(row["status"], row.get("reason")) for row in rows] == [
        ("failed", "RuntimeError: no kernel for 5 experts"),
        ("absent", "no_such_module_anywhere is not installed"),
        ("absent", "its kernels need a CUDA device"),
        ("ok", None),
    ]
    assert len(moe_tables(rows)) == 1


def test_peers_by_name() -> None:
    assert [peer.name for peer in select("all")] == list(PEERS)
    assert [peer.name for peer in select("liger,slipstream")] == ["liger", "slipstream"]
    assert "liger" not in [peer.name for peer in select("all,-liger")]
    for text in ("ligr", "all,-ligr", ""):
        with pytest.raises(ConfigError, match=r"there are all, slipstream"):
            select(text)
    with pytest.raises(ConfigError, match="nothing left"):
        select("liger,-liger")


def test_balance_moves_only_what_is_hot_and_drops_nothing() -> None:
    request = BalanceRequest(
        shapes=[parse_shape("512,32,16,8,2")],
        skews=[1.2],
        dtype=torch.bfloat16,
        device=CPU,
        warmup=1,
        repetitions=2,
    )
    rows = list(bench_balance(request, lambda text: None))
    assert [(row["measured"], row["balance"]) for row in rows] == [
        (measured, balance)
        for measured in ("routing", "layer")
        for balance in ("off", "weight", "causal")
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert [row["rerouted_share"] > 0 for row in rows] == [False] * 4 + [True] * 2
    assert max(row["max_over_mean_load"] for row in rows[4:]) <= 2.0 < rows[3]["max_over_mean_load"]
