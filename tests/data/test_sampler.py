import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.sampler import Sampler, epoch_keys, permute
from slipstream.errors import DataError


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_permute_is_a_permutation(size, seed, epoch):
    keys = epoch_keys(seed, epoch)
    assert sorted(permute(i, size, keys) for i in range(size)) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 900),
    seq_len=st.integers(1, 60),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_disjoint_windows_inside_the_data(tokens, seq_len, seed, shuffle, epoch):
    if tokens < seq_len + 1:
        with pytest.raises(DataError, match=r"data\.seq_len"):
            Sampler(tokens, seq_len, seed, shuffle)
        return
    sampler = Sampler(tokens, seq_len, seed, shuffle)
    count = sampler.num_windows
    starts = sorted(sampler.start(epoch * count + i) for i in range(count))
    assert 0 <= starts[0] < max(seq_len, 1)
    assert starts[-1] + seq_len + 1 <= tokens
    assert all(b - a == seq_len for a, b in itertools.pairwise(starts))


GOLDEN = [866837, 380053, 756501, 533781, 260928, 525760, 955028, 248693]


def test_golden_values_hold_on_every_platform():
    sampler = Sampler(num_tokens=1_000_003, seq_len=128, seed=1234, shuffle=True)
    numbers = [0, 1, 2, 7810, 7811, 7812, 10**9, 10**15]
    assert [sampler.start(n) for n in numbers] == GOLDEN


def test_without_shuffling_windows_come_in_order_every_epoch():
    sampler = Sampler(num_tokens=31, seq_len=10, seed=5, shuffle=False)
    assert sampler.num_windows == 3
    assert [sampler.start(n) for n in range(7)] == [0, 10, 20, 0, 10, 20, 0]


def test_epochs_and_seeds_differ_in_order_and_grid():
    sampler = Sampler(num_tokens=100_000, seq_len=100, seed=0, shuffle=True)
    count = sampler.num_windows
    epochs = [[sampler.start(e * count + i) for i in range(count)] for e in range(4)]
    shifts = {min(epoch) % 100 for epoch in epochs}
    orders = {tuple(start // 100 for start in epoch) for epoch in epochs}
    assert len(shifts) > 1
    assert len(orders) == 4
    other = Sampler(num_tokens=100_000, seq_len=100, seed=1, shuffle=True)
    assert [other.start(i) for i in range(count)] != epochs[0]


def test_order_looks_random():
    size = 1000
    order = [permute(i, size, epoch_keys(3, 0)) for i in range(size)]
    rising = sum(b > a for a, b in itertools.pairwise(order))
    assert 440 < rising < 560
    fixed = sum(i == place for i, place in enumerate(order))
    assert fixed < 8
    # Mean distance of neighbours of a random permutation is size / 3.
    mean = sum(abs(b - a) for a, b in itertools.pairwise(order)) / size
    assert 300 < mean < 367


def test_exactly_one_window_is_enough():
    assert Sampler(num_tokens=11, seq_len=10, seed=0, shuffle=True).start(12345) == 0
    with pytest.raises(DataError, match=r"data\.seq_len = 10 needs at least 11 tokens.*has 10"):
        Sampler(num_tokens=10, seq_len=10, seed=0, shuffle=True)


def test_a_negative_sample_number_is_refused():
    with pytest.raises(ValueError, match="sample_number = -1"):
        Sampler(num_tokens=100, seq_len=10, seed=0, shuffle=True).start(-1)
