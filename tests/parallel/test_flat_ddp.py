"""FlatAdamW under DistributedDataParallel, wherever either of them wants the gradients."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.parallel.flat import FlatAdamW

STEPS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(13, 17), nn.GELU(), nn.LayerNorm(17), nn.Linear(17, 5))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(8, 13, generator=generator)).square().mean()


def rank_main(rank: int, folder: str, gradients: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = make_model()
    optimizer = FlatAdamW(model, lr=1e-2, max_norm=0.1, gradients=gradients)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for step in range(STEPS):
        loss_of(wrapped, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("gradients", ["separate", "flat"])
def test_two_ranks_train_what_one_trains(tmp_path: Path, gradients: str) -> None:
    # Both sides want to say where the gradients are.
    mp.spawn(rank_main, args=(str(tmp_path), gradients), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    model = make_model()
    optimizer = FlatAdamW(model, lr=1e-2, max_norm=0.1, gradients=gradients)
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        # Half of a sum and the sum of halves are the same bits: nothing underflows.
        assert torch.equal(ranks[0][name], value), name
