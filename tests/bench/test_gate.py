"""The correctness gate refuses layers that are wrong."""

import itertools
from collections.abc import Callable

import pytest
import torch

from slipstream.bench.gate import judge, standard
from slipstream.bench.moe import run_layer
from slipstream.bench.moe_peers import Layer, slipstream_layer
from slipstream.bench.moe_problem import make_problem, parse_shape, plain_layer
from slipstream.verify.budget import Results

PROBLEM = make_problem(
    parse_shape("96,32,16,6,2"), skew=0.0, dtype=torch.bfloat16, device=torch.device("cpu")
)


def run() -> Results:
    return run_layer(slipstream_layer(PROBLEM), PROBLEM.dout_TD)


def verdict_of(candidate: Callable[[], Results]):
    against = standard(lambda dtype: plain_layer(PROBLEM, dtype), PROBLEM.dtype)
    return judge(candidate, against, PROBLEM.dtype)


def test_the_layer_passes_and_its_errors_are_those_of_16_bits() -> None:
    verdict = verdict_of(run)
    assert verdict.problems == []
    assert verdict.bitwise
    assert list(verdict.errors) == ["output", *(f"gradient of {n}" for n in PROBLEM.leaves)]
    unit = torch.finfo(torch.bfloat16).eps
    assert all(unit / 16 < error < 2 * unit for error in verdict.errors.values())


@pytest.mark.parametrize("name", list(PROBLEM.leaves))
def test_one_wrong_gradient_is_found(name: str) -> None:
    def wrong() -> Results:
        found = run()
        return found | {f"gradient of {name}": found[f"gradient of {name}"] * 1.02}

    (problem,) = verdict_of(wrong).problems
    assert problem.startswith(f"gradient of {name}: ")


def test_weights_that_do_not_sum_to_one_are_found() -> None:
    layer = slipstream_layer(PROBLEM)
    half = Layer(forward=lambda: layer.forward() / 2, leaves=layer.leaves)
    assert len(verdict_of(lambda: run_layer(half, PROBLEM.dout_TD)).problems) == 5


def test_a_router_without_a_choice_has_no_gradient_and_no_error() -> None:
    one = make_problem(
        parse_shape("8,16,16,1,1"), skew=0.0, dtype=torch.float32, device=torch.device("cpu")
    )
    against = standard(lambda dtype: plain_layer(one, dtype), one.dtype)
    verdict = judge(lambda: run_layer(slipstream_layer(one), one.dout_TD), against, one.dtype)
    assert verdict.problems == []
    assert verdict.errors["gradient of router"] == 0.0


def test_nan_never_passes() -> None:
    def nan() -> Results:
        found = run()
        found["output"][0, 0] = float("nan")
        return found

    assert verdict_of(nan).problems


def test_runs_that_differ_in_a_bit_are_not_bitwise() -> None:
    count = itertools.count()

    def drifting() -> Results:
        found = run()
        found["output"][0, 0] *= 1 + 2**-7 * next(count)
        return found

    assert not verdict_of(drifting).bitwise
