"""``slipstream bench`` and ``slipstream tune`` as a user types them."""

import json
from pathlib import Path

import pytest
import torch

from slipstream.bench.moe_peers import PEERS
from slipstream.cli.bench import app as bench
from slipstream.cli.tune import app as tune
from slipstream.errors import ConfigError, HardwareError
from tests.train.runs import slipstream

SHAPE = "64,32,16,4,2"
ADAMW = ("adamw-master", "adamw-fp32", "adamw-bf16")


def test_all_peers_run_end_to_end_and_the_table_is_rebuilt_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    shown = ("--repetitions", "2", "--device", "cpu", "--out", str(path))
    # Compiled peers run as plain PyTorch: building them is not what is tested here.
    with torch.compiler.set_stance("force_eager"):
        done = slipstream("bench", "moe", "--shape", SHAPE, "--peers", "all", *shown)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["peer"] for row in rows] == list(PEERS)
    status = {row["peer"]: row["status"] for row in rows}
    assert {status[name] for name, peer in PEERS.items() if not peer.cuda_only} == {"ok"}
    assert {status[name] for name, peer in PEERS.items() if peer.cuda_only} == {"absent"}
    assert "liger absent: " in done.stdout
    again = slipstream("bench", "table", str(path))
    assert again.stdout == done.stdout


def test_the_first_call_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--shape", SHAPE, "--peers", "slipstream", "--repetitions", "1", "--device", "cpu")
    done = slipstream("bench", "moe", *arguments, "--cold", "--out", str(path))
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in path.read_text().splitlines())
    assert row["cold_s"] > 0
    assert row["next_shape_s"] > 0


def test_ops_run_end_to_end_and_the_table_is_rebuilt_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--op", "norm", "--op", "norm-linear", "--op", "adamw", "--shape", "32,16")
    shown = ("--repetitions", "2", "--warmup", "1", "--device", "cpu", "--out", str(path))
    with torch.compiler.set_stance("force_eager"):
        done = slipstream("bench", "ops", *arguments, *shown)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    norm = {row["peer"]: row["status"] for row in rows if row["op"] == "norm"}
    assert norm == dict.fromkeys(("slipstream", "eager", "compiled", "torch"), "ok") | {
        "liger": "absent"
    }
    assert {row["op"] for row in rows} == {"norm", "norm-linear", *ADAMW}
    assert "liger absent: " in done.stdout
    assert "slipstream re-emits 0 MiB: " in done.stdout
    assert slipstream("bench", "table", str(path)).stdout == done.stdout


def test_steps_run_end_to_end_and_the_tables_are_rebuilt_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    common = ("--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--out", str(path))
    with torch.compiler.set_stance("force_eager"):
        arms = ("--arms", "stock,stock-liger,slipstream-cache")
        steps = slipstream("bench", "step", "tiny", *arms, "--steps", "1", "--rounds", "1", *common)
        curve = slipstream("bench", "step", "tiny", "--curve", "10", "--seeds", "2", *common)
    assert steps.returncode == curve.returncode == 0, steps.stderr + curve.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["case"], row["arm"], row["status"]) for row in rows] == [
        ("step", "stock", "ok"),
        ("step", "stock-liger", "absent"),
        ("step", "slipstream-cache", "ok"),
        ("step-curve", "stock", "ok"),
        ("step-curve", "slipstream-cache", "ok"),
    ]
    assert "stock-liger absent: " in steps.stdout
    assert "loss curves, 10 steps, 2 seeds" in curve.stdout
    assert slipstream("bench", "table", str(path)).stdout == steps.stdout + curve.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["moe", "--shape", "olmo"], "--shape olmo: expected T,D,F,E,K or one of"),
        (["moe", "--peers", "sonic"], "--peers sonic: there are all"),
        (["moe", "--skew", "-1"], "--skew -1: expected 0 or more"),
        (["moe", "--dtype", "fp8"], "--dtype fp8: expected bf16, fp16, fp32"),
        (["moe", "--device", "tpu"], "--device tpu: expected auto, cuda or cpu"),
        (["ops", "--op", "norms"], "--op norms: there are norm, add-norm"),
        (["ops", "--peers", "ligr"], "--peers ligr: there are all, slipstream"),
        (["ops", "--shape", "64"], "--shape 64: expected T,D or T,D,V"),
        (["step", "olmoe"], r"RECIPE olmoe: expected a \.toml recipe or one of small, tiny"),
        (["step", "tiny", "--arms", "stok"], "--arms stok: there are stock,"),
        (["step", "tiny", "--curve", "5", "--device", "cpu"], "--curve 5: expected at least 10"),
    ],
)
def test_wrong_arguments_name_what_is_allowed(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bench(arguments, standalone_mode=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_what_needs_a_device_says_so() -> None:
    with pytest.raises(ConfigError, match="there is no CUDA device; use cpu"):
        bench(["moe", "--device", "cuda"], standalone_mode=False)
    with pytest.raises(HardwareError, match="nothing to tune on cpu"):
        tune(["moe", "--shape", SHAPE], standalone_mode=False)
