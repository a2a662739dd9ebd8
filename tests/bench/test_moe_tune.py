"""Tuning: which tiles, which rules, and the whole of it under Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.bench.moe_problem import parse_shape
from slipstream.bench.moe_tune import (
    Tuned,
    TuneRequest,
    candidates,
    rules,
    tune_moe,
)
from slipstream.errors import HardwareError
from slipstream.ops.moe.experts import tuned
from slipstream.ops.moe.experts.tuned import PRODUCTS, Tile

CPU = torch.device("cpu")
SMALL, LARGE = (
    Tile(block_m=64, block_n=n, block_k=32, num_warps=4, num_stages=2) for n in (64, 128)
)


def result(shape: str, product: str, tile: Tile) -> Tuned:
    return Tuned(
        shape=parse_shape(shape), product=product, tile=tile, ms=2.0, before_ms=3.0, tried=5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_candidates_are_distinct_and_their_rows_fit_the_schedule(
    product: str, dtype: torch.dtype
) -> None:
    tiles = candidates(product, dtype)
    assert len(set(tiles)) == len(tiles) > 3
    assert product.startswith("dw") or {tile.block_m for tile in tiles} <= {64, 128}
    assert {tile.gather_before for tile in tiles} == {product == "da"}
    loops = {False} if product == "up" else {False, True}
    assert dtype == torch.float32 or {tile.flatten for tile in tiles} == loops


def test_rules_cover_every_row_count_in_order_of_size() -> None:
    found = [
        result("4096,64,32,8,2", "up", LARGE),
        result("512,64,32,8,2", "up", SMALL),
        result("4096,64,32,8,2", "down", LARGE),
    ]
    made = rules(found, torch.bfloat16, CPU)
    assert [(r.product, r.max_rows_per_expert, r.tile) for r in made] == [
        ("up", 128, SMALL),
        ("up", float("inf"), LARGE),
        ("down", float("inf"), LARGE),
    ]
    assert {(r.dtype, r.width, r.hidden, r.capability) for r in made} == {("bfloat16", 64, 32, 0)}


def test_the_rate_counts_the_products_own_flops() -> None:
    found = result("512,64,32,8,2", "up", SMALL)
    assert found.tflop_per_s == pytest.approx(2 * 512 * 2 * 64 * (2 * 32) / 2.0 / 1e9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to tune on")
def test_without_a_device_nothing_is_tuned() -> None:
    request = TuneRequest(shapes=[parse_shape("64,32,16,4,2")], dtype=torch.bfloat16, device=CPU)
    with pytest.raises(HardwareError, match="run it on the GPU that will train"):
        list(tune_moe(request, lambda text: None))


def test_tuning_writes_rules_the_library_reads(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "tuned.json"
    code = (
        "import torch\n"
        "from slipstream.bench import moe_tune\n"
        "from slipstream.cli.tune import app\n"
        "from slipstream.ops.moe.experts import tuned\n"
        "del moe_tune._FULL_PRECISION[1:]\n"
        "app(['moe', '--shape', '8,16,16,1,1', '--dtype', 'fp32', '--repetitions', '1'],"
        " standalone_mode=False)\n"
        "tuned.overrides.cache_clear(), tuned._find.cache_clear()\n"
        "w = torch.empty(1, 16, 16)\n"
        "print(tuned.overrides()[0].tile == tuned.lookup('up', w.device, w.dtype, 8, w))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", tuned.ENVIRONMENT: str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{path}: 6 rules measured, 0 kept" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "True"
    written = json.loads(path.read_text())["rules"]
    assert [rule["product"] for rule in written] == list(PRODUCTS)
