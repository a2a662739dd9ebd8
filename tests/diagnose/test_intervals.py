"""Interval arithmetic against one boolean per time unit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.diagnose import intervals

SIZE = 40
spans = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: tuple(sorted(pair))),
    max_size=12,
).map(lambda pairs: np.array(pairs, dtype=np.int64).reshape(-1, 2))


def cells(of: np.ndarray) -> np.ndarray:
    on = np.zeros(SIZE, dtype=bool)
    for start, end in of.tolist():
        on[start:end] = True
    return on


def is_union(of: np.ndarray) -> bool:
    return bool((of[:, 1] > of[:, 0]).all() and (of[1:, 0] > of[:-1, 1]).all())


@settings(max_examples=150, deadline=None)
@given(spans, spans)
def test_set_operations_equal_boolean_cells(a: np.ndarray, b: np.ndarray) -> None:
    first, second = intervals.union(a), intervals.union(b)
    assert is_union(first)
    for result, cell in (
        (first, cells(a)),
        (intervals.intersect(first, second), cells(a) & cells(b)),
        (intervals.subtract(first, second), cells(a) & ~cells(b)),
    ):
        assert is_union(result)
        assert cells(result).tolist() == cell.tolist()
        assert intervals.measure(result) == cell.sum()


@settings(max_examples=100, deadline=None)
@given(spans, st.integers(0, SIZE), st.integers(0, SIZE))
def test_clip_and_covered_equal_boolean_cells(a: np.ndarray, start: int, end: int) -> None:
    whole = intervals.union(a)
    inside = cells(a)[start:end].sum() if end > start else 0
    assert intervals.measure(intervals.clip(whole, start, end)) == inside
    if end >= start:
        covered = intervals.covered(whole, np.array([start]), np.array([end]))
        assert covered.tolist() == [inside]


@pytest.mark.parametrize("of", [[], [[3, 3]], [[5, 2]]], ids=["none", "empty", "reversed"])
def test_nothing_has_no_union_and_no_gaps(of: list[list[int]]) -> None:
    union = intervals.union(np.array(of, dtype=np.int64).reshape(-1, 2))
    assert union.shape == (0, 2)
    assert intervals.gaps(union).shape == (0, 2)


def test_touching_intervals_merge_and_gaps_lie_between() -> None:
    union = intervals.union(np.array([[8, 9], [0, 2], [2, 4], [6, 7]]))
    assert union.tolist() == [[0, 4], [6, 7], [8, 9]]
    assert intervals.gaps(union).tolist() == [[4, 6], [7, 8]]
