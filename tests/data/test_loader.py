import threading

import numpy as np
import pytest
import torch

from slipstream.data import Loader, Sampler, build_batch, open_shards, sequential_batches
from slipstream.data.raw_bin import describe
from slipstream.data.shards import SetInfo, ShardSet
from slipstream.errors import ConfigError, DataError


@pytest.fixture
def shards(raw_shards):
    return open_shards(raw_shards(np.arange(2000) * 7 % 1999), "train")


@pytest.fixture
def with_documents(tmp_path, raw_shards):
    path = raw_shards(np.arange(30), "documents.bin")
    return ShardSet([describe(path)], SetInfo(path=path), np.array([0, 3, 10, 11, 20]))


def make_loader(shards, *, rank=0, world=1, first=0, prefetch=2, mask=False):
    sampler = Sampler(shards.num_tokens, 16, seed=3, shuffle=True)
    return Loader(
        shards,
        sampler,
        samples_per_step=8,
        rank=rank,
        world=world,
        first_sample=first,
        mask_documents=mask,
        prefetch=prefetch,
        pin_memory=False,
    )


def steps(loader, count):
    with loader:
        return [next(loader).tokens_BL for _ in range(count)]


def test_batch_is_tokens_and_the_tokens_after_them(shards):
    sampler = Sampler(shards.num_tokens, 16, seed=0, shuffle=True)
    batch = build_batch(shards, sampler, [5, 900], mask_documents=False)
    for row, number in enumerate([5, 900]):
        start = sampler.start(number)
        expected = (np.arange(start, start + 17) * 7 % 1999).tolist()
        assert batch.tokens_BL[row].tolist() == expected[:-1]
        assert batch.targets_BL[row].tolist() == expected[1:]
    assert batch.document_BL is None
    assert batch.tokens_BL.dtype == batch.targets_BL.dtype == torch.int64
    assert batch.tokens_BL.is_contiguous()
    assert batch.targets_BL.is_contiguous()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_together_read_what_one_rank_reads(shards, world):
    alone = steps(make_loader(shards), 5)
    ranks = [steps(make_loader(shards, rank=r, world=world), 5) for r in range(world)]
    for step, expected in enumerate(alone):
        assert torch.equal(torch.cat([rank[step] for rank in ranks]), expected)


@pytest.mark.parametrize("prefetch", [1, 5])
def test_the_next_sample_number_is_the_whole_state(shards, prefetch):
    whole = steps(make_loader(shards), 9)
    with make_loader(shards, prefetch=prefetch) as loader:
        assert loader.next_sample == 0
        for _ in range(4):
            next(loader)
        state = loader.next_sample
    assert state == 32
    resumed = steps(make_loader(shards, first=state), 5)
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole[4:], strict=True))


def test_a_resumed_run_may_have_another_number_of_ranks(shards):
    whole = steps(make_loader(shards), 6)
    halves = [steps(make_loader(shards, rank=r, world=2, first=24), 3) for r in range(2)]
    assert torch.equal(torch.cat([halves[0][0], halves[1][0]]), whole[3])


def test_batches_do_not_share_memory(shards):
    with make_loader(shards) as loader:
        first, second = next(loader), next(loader)
        kept = second.tokens_BL.clone()
        first.tokens_BL.fill_(-1)
        assert torch.equal(second.tokens_BL, kept)


def test_an_error_of_the_thread_reaches_next_and_close_joins_it(shards, monkeypatch):
    def fail(start, count):
        raise OSError("disk gone")

    monkeypatch.setattr(shards, "read", fail)
    loader = make_loader(shards)
    with pytest.raises(OSError, match="disk gone"):
        next(loader)
    assert "slipstream-loader" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_close_ends_a_thread_that_waits_for_room(shards):
    loader = make_loader(shards, prefetch=1)
    next(loader)
    loader.close()
    loader.close()
    assert "slipstream-loader" not in {thread.name for thread in threading.enumerate()}


def test_ranks_that_cannot_share_a_step_are_refused(shards):
    with pytest.raises(ConfigError, match=r"train\.tokens_per_step.*8 samples.*multiple of 48"):
        make_loader(shards, world=3)


def test_ragged_documents_are_numbered_and_no_target_crosses_them(with_documents):
    sampler = Sampler(30, 10, seed=0, shuffle=False)
    batch = build_batch(with_documents, sampler, [0, 1], mask_documents=True)
    assert batch.document_BL is not None
    assert batch.document_BL.dtype == torch.int32
    # Documents begin at 0, 3, 10, 11, 20; the rows are tokens 0 to 10 and 10 to 20.
    assert batch.document_BL[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert batch.targets_BL[0].tolist() == [1, 2, -100, 4, 5, 6, 7, 8, 9, -100]
    assert batch.document_BL[1].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert batch.targets_BL[1].tolist() == [-100, 12, 13, 14, 15, 16, 17, 18, 19, -100]
    assert batch.tokens_BL[1].tolist() == list(range(10, 20))


def test_masking_needs_document_offsets(shards):
    sampler = Sampler(shards.num_tokens, 16, seed=0, shuffle=False)
    for attempt in (
        lambda: build_batch(shards, sampler, [0], mask_documents=True),
        lambda: make_loader(shards, mask=True),
        lambda: sequential_batches(shards, 16, 4, None, 0, 1, mask_documents=True),
    ):
        with pytest.raises(DataError, match=r"data\.mask_documents.*raw \.bin"):
            attempt()


@pytest.mark.parametrize(("world", "limit"), [(1, None), (3, None), (2, 7), (5, 3)])
def test_evaluation_reads_every_window_once(shards, world, limit):
    rows = []
    for rank in range(world):
        for batch in sequential_batches(shards, 64, 4, limit, rank, world, mask_documents=False):
            assert 1 <= len(batch.tokens_BL) <= 4
            rows += batch.tokens_BL.tolist()
    count = 1999 // 64 if limit is None else limit
    expected = [(np.arange(64 * i, 64 * i + 64) * 7 % 1999).tolist() for i in range(count)]
    assert rows == expected


def test_evaluation_data_that_is_too_short_is_refused_at_once(shards):
    with pytest.raises(DataError, match=r"data\.seq_len = 5000"):
        sequential_batches(shards, 5000, 4, None, 0, 1, mask_documents=False)
