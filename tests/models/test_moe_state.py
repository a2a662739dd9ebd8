"""Balancing state of ``nn.MoE``: what a step counts, and what its end makes of it."""

from typing import Any

import pytest
import torch

from slipstream.errors import ConfigError, ShapeError
from slipstream.nn import MoE

DIM, EXPERTS, TOP_K, TOKENS = 8, 6, 2, 40


def build(**values: Any) -> MoE:
    block = MoE(DIM, 12, num_experts=EXPERTS, top_k=TOP_K, **values)
    block.reset_parameters(0.5, 0.5)
    return block


def inputs() -> torch.Tensor:
    # One direction dominates, so that some experts are hot.
    return torch.randn(2, TOKENS // 2, DIM) + torch.arange(DIM) / 4


def test_the_load_of_a_step_adds_up_over_micro_batches() -> None:
    block = build()
    expected = torch.zeros(EXPERTS)
    for _ in range(3):
        _, routing = block(inputs())
        expected += routing.counts_E
    assert block.stats().load_E.tolist() == expected.tolist()
    assert expected.sum().item() == 3 * TOKENS * TOP_K
    assert torch.equal(block.stats().demand_E, expected)
    block.eval()
    block(inputs())
    assert torch.equal(block.stats().load_E, expected)


def test_the_bias_moves_against_the_load() -> None:
    block = build(expert_bias=True, bias_update_rate=0.01)
    block(inputs())
    load = block.load_E.clone()
    assert load.max() > load.mean() > load.min()
    summed = block.end_step()
    assert torch.equal(summed.load_E, load)
    for expert in range(EXPERTS):
        sign = float(load[expert] < load.mean()) - float(load[expert] > load.mean())
        assert block.expert_bias_E[expert].item() == pytest.approx(0.01 * sign)


def test_the_bias_balances_over_steps_and_leaves_the_weights() -> None:
    block, x = build(expert_bias=True, bias_update_rate=0.02), inputs()
    first = block(x)[1].counts_E
    for _ in range(60):
        block.forget_step()
        routing = block(x)[1]
        block.end_step()
    assert routing.counts_E.max() < first.max()
    scores = torch.nn.functional.linear(x.flatten(0, 1), block.router).softmax(-1)
    assert torch.allclose(routing.weight_TK, scores.gather(1, routing.expert_TK), atol=1e-6)


def test_without_a_bias_the_choice_never_moves() -> None:
    block, x = build(), inputs()
    before = block(x)[1].expert_TK
    block.end_step()
    assert block.expert_bias_E is None
    assert torch.equal(block(x)[1].expert_TK, before)


def test_end_step_smooths_the_demand_and_forgets() -> None:
    block = build(window=4)
    block(inputs())
    demand = block.demand_E.clone()
    block.end_step()
    assert torch.allclose(block.smoothed_E, demand / 4)
    assert block.steps.item() == 1
    assert not any(counter.any() for counter in block.stats())
    block(inputs())
    second = block.demand_E.clone()
    block.end_step()
    assert torch.allclose(block.smoothed_E, demand / 4 + (second - demand / 4) / 4)


def test_forget_step_drops_the_load_only() -> None:
    block = build()
    block(inputs())
    block.end_step()
    smoothed = block.smoothed_E.clone()
    block(inputs())
    assert block.load_E.sum() > 0
    block.forget_step()
    assert not any(counter.any() for counter in block.stats())
    assert torch.equal(block.smoothed_E, smoothed)
    assert block.steps.item() == 1


def test_counters_of_all_ranks_close_the_step() -> None:
    block = build(expert_bias=True, window=1)
    block(inputs())
    load, demand, rerouted = (counter.clone() for counter in block.stats())
    counters = block.counters()
    assert torch.equal(counters, torch.cat((load, demand, rerouted[None])))
    summed = block.end_step(2 * counters)
    assert torch.equal(summed.load_E, 2 * load)
    assert torch.equal(block.smoothed_E, 2 * demand)
    assert summed.rerouted.shape == ()


def test_balancing_is_for_training_and_ramps_in() -> None:
    block, x = build(threshold=1.0, window=1, ramp=2, depth=6), inputs()
    plain = block(x)[1].counts_E
    assert plain.max() > 1.2 * plain.float().mean()
    rerouted = []
    for _ in range(3):
        routing = block(x)[1]
        rerouted.append(block.rerouted.item())
        block.end_step()
    assert rerouted[0] == 0
    assert rerouted[2] > 0
    assert rerouted[1] <= rerouted[2]
    assert routing.counts_E.max() < plain.max()
    assert routing.counts_E.sum() == plain.sum()
    assert torch.equal(block.eval()(x)[1].counts_E, plain)


def test_an_infinite_threshold_is_bitwise_plain_routing() -> None:
    plain, off = build(), build(threshold=float("inf"))
    off.load_state_dict(plain.state_dict())
    x = inputs()
    for _ in range(3):
        first, second = plain(x), off(x)
        assert torch.equal(first[0], second[0])
        assert off.stats().rerouted == 0
        plain.end_step()
        off.end_step()


def test_the_output_is_the_weighted_sum_of_experts_and_the_shared_one() -> None:
    block, x = build(shared_hidden=10, normalize=True, scale=1.5), inputs()
    out, routing = block(x)
    flat = x.flatten(0, 1)
    expected = block.shared(flat)
    for token in range(TOKENS):
        for slot in range(TOP_K):
            expert = routing.expert_TK[token, slot]
            gate, up = (block.w13[expert] @ flat[token]).chunk(2)
            value = block.w2[expert] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += routing.weight_TK[token, slot] * value
    assert torch.allclose(out.flatten(0, 1), expected, atol=1e-5)
    assert torch.allclose(routing.weight_TK.sum(1), torch.tensor(1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -1.0}, r"threshold = -1.0, expected 1 \(the mean load\) or more"),
        ({"threshold": float("nan")}, "threshold = nan"),
        ({"window": 0}, "window = 0, expected 1 step or more"),
        ({"ramp": -3}, "ramp = -3"),
        ({"shared_hidden": -1}, "shared_hidden = -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MoE(16, 8, num_experts=4, top_k=2, **options)


@pytest.mark.parametrize("shape", [(16,), (4, 16), (2, 3, 15)])
def test_input_of_another_shape_is_refused(shape):
    layer = MoE(16, 8, num_experts=4, top_k=2)
    with pytest.raises(ShapeError, match=r"MoE: x has shape .* expected \(any, any, 16\)"):
        layer(torch.zeros(shape))
