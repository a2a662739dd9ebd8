import json
from dataclasses import asdict

import pytest
import torch
from torch.testing import assert_close

from slipstream.errors import ConfigError
from slipstream.ops.moe import moe_mlp
from slipstream.ops.moe.experts import tuned
from slipstream.ops.moe.experts.tuned import PRODUCTS, Rule, Tile
from slipstream.ops.triton_support import interpreting
from tests.ops.implementations import forced
from tests.ops.routings import LOADS, routing_of

TILE = Tile(block_m=128, block_n=64, block_k=32, num_warps=4, num_stages=2)
WEIGHT = torch.empty(8, 16, 32, device="meta")
TILES = {
    "halves": Tile(block_m=64, block_n=32, block_k=16, num_warps=4, num_stages=1),
    "gather-before": Tile(
        block_m=128, block_n=64, block_k=32, num_warps=4, num_stages=2, gather_before=True
    ),
    "flat-alone": Tile(
        block_m=128, block_n=32, block_k=32, num_warps=4, num_stages=2, group=1, flatten=True
    ),
    "fused": Tile(
        block_m=64,
        block_n=32,
        block_k=16,
        num_warps=4,
        num_stages=1,
        gather_before=True,
        fuse=True,
    ),
    "crowded": Tile(
        block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2, group=3, programs_per_sm=2
    ),
}


@pytest.fixture(autouse=True)
def _unread() -> None:
    tuned.overrides.cache_clear()
    tuned._find.cache_clear()


@pytest.fixture(autouse=True)
def _forget(_unread: None):
    yield
    tuned.overrides.cache_clear()
    tuned._find.cache_clear()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_a_tile_changes_how_not_what(tile: Tile, load: str) -> None:
    # 150 rows of one expert are a full tile and a tail that fits one half of the next.
    routing = routing_of(load, 150, 3, 1)
    dtype = torch.float32 if interpreting() else torch.float16
    leaves = [torch.randint(-1, 2, s).to(dtype) for s in ((150, 40), (3, 24, 40), (3, 40, 24))]
    found = []
    for implementation, tiles in (("composed", {}), ("triton", dict.fromkeys(PRODUCTS, tile))):
        inputs = [t.clone().requires_grad_() for t in leaves]
        with forced("moe_mlp", implementation), tuned.force(**tiles):
            out = moe_mlp(
                *inputs, routing._replace(weight_TK=torch.ones(150, 1)), activation="relu2"
            )
            out.backward(torch.ones_like(out))
        found.append([out, *(t.grad for t in inputs)])
    for ours, stock in zip(found[1], found[0], strict=True):
        assert_close(ours, stock, rtol=0, atol=0)


def test_every_device_dtype_and_product_has_a_tile() -> None:
    for capability in (tuned.INTERPRETER, 80, 86, 89, 90, 100, 103, 120):
        for dtype in ("bfloat16", "float16", "float32"):
            for product in PRODUCTS:
                tile = tuned._find(product, capability, dtype, 64, 2048, 1024)
                assert tile.block_m in (64, 128)
                assert tuned.TILE_ROWS % tile.block_m == 0


def test_shared_memory_of_a_tile_fits_its_device() -> None:
    limits = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
    for capability, kib in limits.items():
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            for product in PRODUCTS:
                tile = tuned._find(product, capability, dtype, 4096, 2048, 1024)
                stage = (tile.block_m + tile.block_n) * tile.block_k * size
                assert stage * tile.num_stages <= kib * 1024, (capability, product)


def test_overrides_win_in_their_bucket_and_for_their_shape(monkeypatch, tmp_path) -> None:
    path = tmp_path / "tuned.json"
    rule = Rule(
        product="up", capability=0, max_rows_per_expert=64, tile=TILE, dtype="float32", width=16
    )
    tuned.write(path, [rule])
    monkeypatch.setenv(tuned.ENVIRONMENT, str(path))
    cpu = torch.device("cpu")
    standing = tuned._find("up", 0, "float16", 64, 16, 32)
    assert tuned.lookup("up", cpu, torch.float32, 8 * 60, WEIGHT) == TILE
    assert tuned.lookup("up", cpu, torch.float32, 8 * 65, WEIGHT) == standing
    assert tuned.lookup("up", cpu, torch.float16, 8 * 60, WEIGHT) == standing
    assert tuned.lookup("down", cpu, torch.float32, 8 * 60, WEIGHT) == standing
    other = torch.empty(8, 24, 32, device="meta")
    assert tuned.lookup("up", cpu, torch.float32, 8 * 60, other) == standing


def _file(**changed: int) -> str:
    rule = {"product": "up", "capability": 90, "max_rows_per_expert": 64}
    return json.dumps({"rules": [{**rule, "tile": {**asdict(TILE), **changed}}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not a file of tuned tiles"),
        ('{"tiles": []}', "rules"),
        (json.dumps({"rules": [{"product": "sideways"}]}), "sideways"),
        (json.dumps({"rules": [{"product": "up", "speed": 1}]}), "speed"),
        (json.dumps({"rules": [{"product": "up", "tile": {"block_m": 64}}]}), "block_n"),
        ("[]", "not a file of tuned tiles"),
        (_file(block_m=96), "block_m = 96, expected a power of two"),
        (_file(block_m=256), "block_m = 256 of up, expected 64 or 128"),
        (_file(num_warps=0), "num_warps = 0"),
    ],
)
def test_a_bad_override_file_is_named(monkeypatch, tmp_path, text: str, message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    monkeypatch.setenv(tuned.ENVIRONMENT, str(path))
    with pytest.raises(ConfigError, match=message):
        tuned.overrides()


def test_a_named_override_file_has_to_exist(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(tuned.ENVIRONMENT, str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="no such file"):
        tuned.overrides()
