"""When what is offloaded leaves and returns, what that delays, and the peak that follows."""

from dataclasses import replace

import pytest

from slipstream.recompute.cost import Choice, ModelCosts
from slipstream.recompute.timeline import Outcome, outcome, peak_bytes
from tests.recompute.costs import cost, model_costs


def layers(count: int, moved: tuple[int, ...]) -> list[Choice]:
    """Each keeps 100 bytes, takes 10 ms in forward and 20 in backward."""
    found = Choice(actions=(), cost=cost(100, 30.0, forward_ms=10.0))
    return [replace(found, moved=(100,) if i in moved else ()) for i in range(count)]


def costs(bytes_per_ms: float, tail_ms: float = 0.0) -> ModelCosts:
    found = model_costs({}, bytes_per_ms=bytes_per_ms)
    return replace(found, tail=replace(found.tail, ms=tail_ms), has_grads=True)


def test_peak_counts_what_is_there_at_once() -> None:
    def peak(*given, has_grads: bool) -> int:
        chosen = [Choice(actions=(), cost=each) for each in given]
        here = [()] * len(chosen)
        return peak_bytes(around, chosen, here, range(len(chosen)), has_grads=has_grads)

    around = model_costs({}, static=1000, tail=40)
    small = cost(100, 1.0, 30, 7), cost(200, 1.0, 60, 9)
    # Both kept, and the tail on top.
    assert peak(*small, has_grads=False) == 1000 + 100 + 200 + 60 + 9
    large = cost(100, 1.0, 30, 700), cost(200, 1.0, 60, 900)
    # The gradients of the second, then the first with its own.
    assert peak(*large, has_grads=False) == 1000 + 900 + 100 + 30 + 700
    # Added to gradients that are there, only one is there at a time.
    assert peak(*large, has_grads=True) == 1000 + 100 + 200 + 60 + 900


def test_a_copy_that_is_hidden_costs_nothing() -> None:
    # 20 ms: from the end of layer 0 to that of layer 2; back before 60 ms of backward have gone.
    found = outcome(costs(5.0), layers(4, (0,)))
    assert (found.leave[0], found.back[0]) == ((2,), 1)
    assert found.ms == 4 * 30.0
    assert found.peak_bytes == 300


def test_copies_queue_and_backward_waits_for_the_last() -> None:
    # 25 ms each: under way from 10 to 35 and to 60; forward ends at 40 and the tail at 45.
    found = outcome(costs(4.0, tail_ms=5.0), layers(4, (0, 1)))
    assert found.leave[:2] == ((3,), (4,))
    # Layer 2 begins at 20: layer 1's copy is there at 45 instead of 40, layer 0's by 70, not 65.
    assert found.back[:2] == (2, 2)
    assert found.ms == 4 * 30.0 + 5.0 + 15.0 + 5.0 + 5.0


def test_small_tensors_are_gone_before_the_large_one() -> None:
    # 5, 10 and 20 ms from 10 on: gone at 15, 25 and 45, of which forward has 10 a layer.
    whole, *rest = layers(4, (0,))
    parts = [replace(whole, moved=(20, 40, 80)), *rest]
    found = outcome(costs(4.0, tail_ms=10.0), parts)
    assert found.leave[0] == (1, 2, 4)
    assert found.ms == 4 * 30.0 + 10.0
    # All four layers' 400 less 60; in one piece all of it would still be there.
    assert found.peak_bytes == 340
    assert (
        outcome(costs(4.0, tail_ms=10.0), [replace(whole, moved=(140,)), *rest]).peak_bytes == 400
    )


def test_a_copy_that_cannot_be_back_in_time_is_waited_for() -> None:
    # 50 ms, of which 20 hide behind the layer after it.
    found = outcome(costs(2.0, tail_ms=100.0), layers(2, (0,)))
    assert found.back[0] == 1
    assert found.ms == 2 * 30.0 + 100.0 + 30.0


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_moved_is_nothing_waited_for(count: int) -> None:
    found = outcome(costs(1e-3), layers(count, ()))
    assert isinstance(found, Outcome)
    assert found.ms == count * 30.0
    assert found.peak_bytes == count * 100


def test_a_byte_that_travels_slows_down_what_is_computed() -> None:
    base = costs(1e9)
    assert base.link is not None
    slow = replace(base, link=replace(base.link, slowdown_ms_per_byte=0.5))
    assert outcome(slow, layers(3, (0, 1))).ms == pytest.approx(3 * 30.0 + 0.5 * 200, abs=1e-3)
