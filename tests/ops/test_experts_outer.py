"""The weight gradients of the experts: one kernel, with and without copied tails."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from slipstream.ops.moe.experts import tuned

pytest.importorskip("triton")
launch = pytest.importorskip("slipstream.ops.moe.experts.launch")

LEFT, RIGHT = 40, 72
SIZES = {
    "odd": [63, 0, 1, 64, 257],
    "multiples": [64, 128, 32, 0, 96],
    "one-takes-all": [0, 0, 385, 0, 0],
    "absent-rows": [5, 31, 0, 33, 64],
    "no-rows-used": [0, 0, 0, 0, 0],
}
ABSENT = {"absent-rows": 61, "no-rows-used": 40}


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


def operands(
    load: str, room: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, "launch.Layout", list[int]]:
    """Both operands, NaN wherever no expert's row is, and where each expert's rows end."""
    ends = torch.tensor([0, *SIZES[load]], device="cpu").cumsum(0)
    layout = launch.Layout.of_rows(ends.to(device), int(ends[-1]) + ABSENT.get(load, 0))
    generator = torch.Generator("cpu").manual_seed(0)
    found = []
    for width in (LEFT, RIGHT):
        rows = torch.full((layout.num_rows + room * layout.room, width), torch.nan, device="cpu")
        rows[: ends[-1]] = torch.randn(int(ends[-1]), width, generator=generator, device="cpu")
        found.append(rows.to(device))
    return *found, layout, ends.tolist()


def tile_for(left: torch.Tensor, layout: "launch.Layout", flatten: bool) -> tuned.Tile:
    like = torch.empty(layout.num_experts, LEFT, RIGHT, device="meta")
    found = tuned.lookup("dw2", left.device, left.dtype, layout.num_rows, like)
    return replace(found, flatten=flatten)


def run(
    load: str,
    device: torch.device,
    *,
    room: bool,
    flatten: bool,
    transposed: bool = False,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    left, right, layout, _ = operands(load, room, device)
    like = torch.empty(layout.num_experts, LEFT, RIGHT, device="meta")
    if transposed:
        like = like.mT.contiguous().mT
    tile = tile_for(left, layout, flatten)
    return launch.outer(left, right, layout, tile, like=like, into=into)


@pytest.mark.parametrize("load", SIZES)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_tails_change_no_bit(load: str, transposed: bool, device: torch.device) -> None:
    plain = run(load, device, room=False, flatten=False, transposed=transposed)
    tails = run(load, device, room=True, flatten=True, transposed=transposed)
    assert plain.stride() == tails.stride()
    assert torch.equal(plain, tails)
    left, right, _, ends = operands(load, False, device)
    for expert, (start, end) in enumerate(pairwise(ends)):
        exact = left[start:end].double().T @ right[start:end].double()
        torch.testing.assert_close(tails[expert].double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("flatten", [False, True])
def test_without_room_nothing_is_copied(flatten: bool, device: torch.device) -> None:
    left, right, layout, _ = operands("odd", False, device)
    before = left.clone(), right.clone()
    tile = tile_for(left, layout, flatten)
    like = torch.empty(layout.num_experts, LEFT, RIGHT, device="meta")
    launch.outer(left, right, layout, tile, like=like, into=None)
    assert torch.equal(left, before[0])
    assert torch.equal(right, before[1])


@pytest.mark.parametrize("load", SIZES)
def test_adding_to_a_buffer(load: str, device: torch.device) -> None:
    sums = torch.randn(len(SIZES[load]), LEFT, RIGHT, device=device)
    found = run(load, device, room=True, flatten=True, into=sums.clone())
    plain = run(load, device, room=True, flatten=True)
    assert torch.equal(found, sums + plain)


@pytest.mark.parametrize(
    ("dtype", "width", "fits"),
    [(torch.bfloat16, 16, True), (torch.bfloat16, 12, False), (torch.float32, 12, True)],
)
def test_a_descriptor_only_where_the_rows_of_the_gradient_are_aligned(
    dtype: torch.dtype, width: int, fits: bool
) -> None:
    tile = tuned.Tile(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=1)
    gradient = torch.empty(2, 8, width, dtype=dtype, device="cpu")
    assert (launch._gradient_descriptor(gradient, tile) is not None) == fits
