"""The global balance loss of ``nn.MoE``: shares of the slots of all ranks, smoothed over steps."""

import pytest
import torch

from slipstream.nn import MoE
from slipstream.ops.moe import route

TOKENS, DIM, EXPERTS = 24, 8, 6


@pytest.fixture
def block() -> MoE:
    block = MoE(DIM, 12, num_experts=EXPERTS, top_k=2, aux_scope="global", window=4)
    block.reset_parameters(0.5, 0.5)
    return block


def _aux_loss(block: MoE, x_BLD: torch.Tensor) -> torch.Tensor:
    return block(x_BLD)[1].aux_loss


def test_before_the_first_step_shares_are_equal_and_nothing_is_pulled(block):
    loss = _aux_loss(block, torch.randn(2, TOKENS // 2, DIM))
    (grad,) = torch.autograd.grad(loss, block.router)
    torch.testing.assert_close(loss, torch.tensor(1.0))
    assert grad.abs().max() < 1e-6


def test_shares_are_those_of_all_ranks_in_the_steps_before(block):
    x_BLD = torch.randn(2, TOKENS // 2, DIM)
    demands = []
    for step in range(3):
        block(x_BLD + step)
        other_rank = torch.randint(0, 9, (EXPERTS,)).float()
        counters = block.counters()
        counters[EXPERTS : 2 * EXPERTS] += other_rank
        demands.append(counters[EXPERTS : 2 * EXPERTS].clone())
        block.end_step(counters)
    smoothed_E = torch.zeros(EXPERTS)
    for demand_E in demands:
        smoothed_E += (demand_E - smoothed_E) / 4
    logits_TE = x_BLD.flatten(0, 1) @ block.router.T
    share_E = smoothed_E / smoothed_E.sum()
    expected = route(logits_TE, top_k=2, aux="global", share_E=share_E).aux_loss
    torch.testing.assert_close(_aux_loss(block, x_BLD), expected)
    own = route(logits_TE, top_k=2, aux="batch").aux_loss
    assert abs(own - expected) > 1e-3


def test_the_threshold_follows_the_steps_and_is_made_once_for_each():
    block = MoE(DIM, 12, num_experts=EXPERTS, top_k=2, threshold=2.0, ramp=4)
    block.reset_parameters(0.5, 0.5)
    assert block._threshold_now().item() == float("inf")
    saved = block.state_dict()
    saved["steps"] = torch.tensor(2.0)
    for expected in (8.0, 4.0, 8 / 3, 2.0, 2.0):
        block.end_step()
        assert block._threshold_now().item() == pytest.approx(expected)
        assert block._threshold_now() is block._threshold_now()
    block.load_state_dict(saved)
    assert block._threshold_now().item() == 4.0
