"""Load balancing over steps of ``nn.MoE``: window, ramp, and the load it ends at."""

import pytest
import torch

from slipstream.models import BalanceConfig, ModelConfig, MoEConfig, Transformer
from slipstream.nn import MoE

EXPERTS, TOP_K, TOKENS, DIM = 16, 2, 512, 24
THRESHOLD, WINDOW, RAMP = 2.0, 4, 6


def _zipf_block(mode: str, **values) -> MoE:
    """A router whose experts are wanted like 1, 2 ** -1.2, 3 ** -1.2, ..."""
    settings = {"threshold": THRESHOLD, "window": WINDOW, "ramp": RAMP, "depth": 16}
    block = MoE(DIM, 8, num_experts=EXPERTS, top_k=TOP_K, mode=mode, **(settings | values))
    block.reset_parameters(0.02, 0.02)
    with torch.no_grad():
        block.router.normal_(std=0.3)
        block.router[:, 0] = -1.2 * torch.arange(1, EXPERTS + 1).log()
    return block


def _step(block: MoE):
    x_BLD = torch.randn(2, TOKENS // 2, DIM)
    x_BLD[:, :, 0] = 1
    routing = block(x_BLD)[1]
    return routing, block.end_step()


def _ratio(load_E: torch.Tensor) -> float:
    return (load_E.max() / load_E.mean()).item()


@pytest.mark.parametrize("mode", ["weight", "causal"])
def test_the_load_of_a_zipf_router_comes_down_to_the_threshold(mode):
    block = _zipf_block(mode)
    ratios, demands, rerouted = [], [], []
    for _ in range(RAMP + 8):
        routing, stats = _step(block)
        assert stats.load_E.sum() == stats.demand_E.sum() == TOKENS * TOP_K
        assert stats.rerouted == routing.rerouted
        assert torch.equal(stats.demand_E, routing.demand_E.float())
        assert stats.rerouted >= (stats.demand_E - stats.load_E).clamp(min=0).sum()
        ratios.append(_ratio(stats.load_E))
        demands.append(_ratio(stats.demand_E))
        rerouted.append(stats.rerouted.item())
    assert min(demands) > 3.5
    assert ratios[0] == demands[0]
    assert rerouted[0] == 0
    assert max(ratios[RAMP:]) <= THRESHOLD
    # On the way the load follows the ramp: threshold * ramp / step.
    for step in range(1, RAMP):
        assert ratios[step] <= max(THRESHOLD * RAMP / step, THRESHOLD)
    assert any(ratio > THRESHOLD for ratio in ratios[1:RAMP])
    assert min(rerouted[RAMP:]) > 0


@pytest.mark.parametrize("mode", ["weight", "causal"])
def test_an_expert_stays_hot_while_the_router_wants_it(mode):
    """The smoothed load is what the router asks for: shedding does not cool an expert down."""
    block = _zipf_block(mode)
    for _ in range(RAMP + 4):
        _step(block)
    demand_E = block.smoothed_E / block.smoothed_E.mean()
    assert demand_E[0] > 3.5
    # And when the router wants another one, the window forgets the first.
    with torch.no_grad():
        block.router[:, 0] = block.router[:, 0].flip(0)
    for _ in range(3 * WINDOW):
        routing, stats = _step(block)
    assert block.smoothed_E.argmax() == EXPERTS - 1
    assert _ratio(stats.load_E) <= THRESHOLD
    assert routing.counts_E[0] < routing.counts_E[EXPERTS - 1]


def test_without_a_threshold_and_in_evaluation_nothing_moves():
    plain, balanced = _zipf_block("causal", threshold=float("inf")), _zipf_block("causal")
    balanced.load_state_dict(plain.state_dict())
    for _ in range(RAMP):
        assert _step(plain)[1].rerouted == 0
        _step(balanced)
    plain.load_state_dict(balanced.state_dict())
    x_BLD = torch.randn(2, 20, DIM)
    x_BLD[:, :, 0] = 1
    balanced.eval()
    assert torch.equal(balanced(x_BLD)[0], plain(x_BLD)[0])


@pytest.mark.parametrize("mode", ["weight", "causal"])
def test_the_mode_reaches_the_layer(mode):
    moe = MoEConfig(num_experts=4, top_k=2, d_ff=8, balance=BalanceConfig(mode=mode))
    config = ModelConfig(
        vocab_size=11, num_layers=2, d_model=8, num_heads=2, d_ff=8, max_seq_len=8, moe=moe
    )
    blocks = [module for module in Transformer(config).modules() if isinstance(module, MoE)]
    assert blocks
    assert {block.mode for block in blocks} == {mode}
