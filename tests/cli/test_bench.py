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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "olmo"], "--shape olmo: expected T,D,F,E,K or one of"),
        (["--peers", "sonic"], "--peers sonic: there are all"),
        (["--skew", "-1"], "--skew -1: expected 0 or more"),
        (["--dtype", "fp8"], "--dtype fp8: expected bf16, fp16, fp32"),
        (["--device", "tpu"], "--device tpu: expected auto, cuda or cpu"),
    ],
)
def test_wrong_arguments_name_what_is_allowed(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bench(["moe", *arguments], standalone_mode=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_what_needs_a_device_says_so() -> None:
    with pytest.raises(ConfigError, match="there is no CUDA device; use cpu"):
        bench(["moe", "--device", "cuda"], standalone_mode=False)
    with pytest.raises(HardwareError, match="nothing to tune on cpu"):
        tune(["moe", "--shape", SHAPE], standalone_mode=False)
