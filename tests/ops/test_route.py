from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from slipstream.errors import ConfigError, ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import route
from tests.budget import results
from tests.ops.compiling import assert_compiles

SMALL = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    # What routing means; test_route_kernels.py holds the kernels to it.
    with dispatch.force(moe_route="reference", moe_sort="reference"):
        yield


def _slow_route(logits_TE, top_k, score, bias_E, num_groups, top_groups, group_top, normalize):
    """Expert indices and weights, one token at a time with Python's sort."""
    num_experts = logits_TE.shape[1]
    width = num_experts // num_groups
    chosen_T, weights_T = [], []
    for logits in logits_TE:
        scores = (logits.softmax(0) if score == "softmax" else logits.sigmoid()).tolist()
        ranked = [s + b for s, b in zip(scores, bias_E.tolist(), strict=True)]
        groups = [range(g * width, (g + 1) * width) for g in range(num_groups)]
        value = [sum(sorted((ranked[e] for e in g), reverse=True)[:group_top]) for g in groups]
        best = sorted(range(num_groups), key=lambda g: (-value[g], g))[:top_groups]
        open_experts = [e for g in best for e in groups[g]]
        chosen = sorted(open_experts, key=lambda e: (-ranked[e], e))[:top_k]
        weights = [scores[e] for e in chosen]
        chosen_T.append(chosen)
        weights_T.append([w / sum(weights) for w in weights] if normalize else weights)
    return torch.tensor(chosen_T), torch.tensor(weights_T, dtype=logits_TE.dtype)


@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("groups", [(1, 1, 2), (4, 2, 2), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 63])
def test_matches_a_loop_over_tokens(tokens, score, groups, normalize):
    logits_TE, bias_E = torch.randn(tokens, 12).double(), torch.randn(12).double() / 5
    num_groups, top_groups, group_top = groups
    options = {
        "top_k": 3,
        "score": score,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "group_top": group_top,
        "normalize": normalize,
    }
    expert_TK, weight_TK = _slow_route(logits_TE, bias_E=bias_E, **options)
    routing = route(logits_TE, bias_E=bias_E, scale=2.5, **options)
    assert torch.equal(routing.expert_TK, expert_TK)
    assert_close(routing.weight_TK, 2.5 * weight_TK)


def _hf_router(kind: type, config, logits_TE: torch.Tensor):
    router = kind(config)
    router.weight.data = torch.eye(logits_TE.shape[1])
    return router


@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
def test_matches_the_router_of_qwen3_moe(normalize):
    logits_TE = torch.randn(63, 8)
    config = Qwen3MoeConfig(
        hidden_size=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    router = _hf_router(Qwen3MoeTopKRouter, config, logits_TE)
    _, weight_TK, expert_TK = router(logits_TE)
    routing = route(logits_TE, top_k=3, normalize=normalize)
    assert torch.equal(routing.expert_TK, expert_TK)
    assert_close(routing.weight_TK, weight_TK)


def test_matches_the_router_and_balance_loss_of_mixtral():
    logits_TE = torch.randn(63, 8)
    config = MixtralConfig(hidden_size=8, num_local_experts=8, num_experts_per_tok=2)
    _, weight_TK, expert_TK = _hf_router(MixtralTopKRouter, config, logits_TE)(logits_TE)
    routing = route(logits_TE, top_k=2, normalize=True, aux="batch")
    assert torch.equal(routing.expert_TK, expert_TK)
    assert_close(routing.weight_TK, weight_TK)
    # Theirs counts slots per token and so is top_k for perfect balance; ours is 1.
    assert_close(routing.aux_loss * 2, load_balancing_loss_func((logits_TE,), 8, 2))


def test_matches_the_router_of_deepseek_v3():
    logits_TE, bias_E = torch.randn(63, 16), torch.rand(16)
    config = DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    router = _hf_router(DeepseekV3TopkRouter, config, logits_TE)
    router.e_score_correction_bias.copy_(bias_E)
    _, weight_TK, expert_TK = router(logits_TE)
    routing = route(
        logits_TE,
        top_k=4,
        score="sigmoid",
        bias_E=bias_E,
        num_groups=4,
        top_groups=2,
        normalize=True,
        scale=2.5,
    )
    # Theirs is not sorted.
    expected, order = expert_TK.sort(1)
    actual, ours = routing.expert_TK.sort(1)
    assert torch.equal(actual, expected)
    assert_close(routing.weight_TK.gather(1, ours), weight_TK.gather(1, order))


def test_ties_go_to_the_lower_index():
    routing = route(torch.zeros(5, 300), top_k=4)
    assert torch.equal(routing.expert_TK, torch.arange(4).expand(5, 4))
    grouped = route(torch.zeros(5, 12), top_k=2, num_groups=4, top_groups=1)
    assert torch.equal(grouped.expert_TK, torch.tensor([0, 1]).expand(5, 2))


def test_bias_moves_the_choice_and_not_the_weights():
    logits_TE = torch.randn(63, 8)
    bias_E = torch.zeros(8)
    bias_E[5] = 100.0
    routing = route(logits_TE, top_k=2, score="sigmoid", bias_E=bias_E)
    assert (routing.expert_TK[:, 0] == 5).all()
    assert torch.equal(routing.weight_TK, logits_TE.sigmoid().gather(1, routing.expert_TK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_and_losses_are_fp32(dtype):
    routing = route(torch.randn(9, 8).to(dtype), top_k=2, aux="batch")
    fields = (routing.weight_TK, routing.aux_loss, routing.z_loss)
    assert [t.dtype for t in fields] == [torch.float32] * 3


@SMALL
@given(
    tokens=st.sampled_from([0, 1, 2, 7, 63]),
    num_experts=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 2**16),
)
def test_maps_are_consistent(tokens, num_experts, data, seed):
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    # Few distinct values, so that ties are common.
    logits_TE = torch.randint(0, 3, (tokens, num_experts), generator=generator).float()
    routing = route(logits_TE, top_k=top_k)
    rows = tokens * top_k
    flat_N = routing.expert_TK.flatten()
    assert torch.equal(routing.order_N[routing.position_N], torch.arange(rows))
    assert torch.equal(routing.position_N[routing.order_N], torch.arange(rows))
    by_expert_then_slot = sorted(range(rows), key=lambda slot: (flat_N[slot].item(), slot))
    assert routing.order_N.tolist() == by_expert_then_slot
    counts = [int((flat_N == e).sum()) for e in range(num_experts)]
    assert routing.counts_E.tolist() == counts == routing.demand_E.tolist()
    assert routing.offsets_E1.tolist() == [sum(counts[:e]) for e in range(num_experts + 1)]
    assert routing.rerouted.item() == 0
    assert all(len(set(row)) == top_k for row in routing.expert_TK.tolist())


def test_dtypes_of_the_maps():
    routing = route(torch.randn(9, 4), top_k=2)
    assert (routing.offsets_E1.dtype, routing.expert_TK.dtype) == (torch.int32, torch.int64)
    assert (routing.order_N.dtype, routing.position_N.dtype) == (torch.int64, torch.int64)
    assert routing.top_k == 2


def test_maps_survive_poisoned_memory(poisoned):
    routing = route(torch.randn(63, 8), top_k=2, load_E=torch.rand(8), threshold=1.5)
    assert torch.equal(routing.order_N.sort()[0], torch.arange(126))
    assert torch.equal(routing.position_N[routing.order_N], torch.arange(126))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_loss_per_sequence_is_the_mean_over_separate_sequences(score):
    logits_TE = torch.randn(3 * 21, 8, dtype=torch.float64)
    alone = [
        route(part, top_k=2, score=score, aux="batch").aux_loss for part in logits_TE.split(21)
    ]
    together = route(logits_TE, top_k=2, score=score, aux="sequence", num_sequences=3).aux_loss
    assert_close(together, torch.stack(alone).mean())
    one = route(logits_TE, top_k=2, score=score, aux="batch").aux_loss
    assert abs(one - together) > 1e-3


def test_balance_loss_is_1_for_perfect_balance_and_num_experts_for_none():
    even = route(torch.eye(8).repeat(4, 1) * 50, top_k=1, aux="batch").aux_loss
    assert_close(even, torch.tensor(1.0))
    logits_TE = torch.zeros(32, 8)
    logits_TE[:, 3] = 50.0
    assert_close(route(logits_TE, top_k=1, aux="batch").aux_loss, torch.tensor(8.0))


def test_balance_loss_follows_the_demand_and_not_what_balancing_made_of_it():
    logits_TE = torch.randn(32, 4)
    logits_TE[:, 0] += 3
    plain = route(logits_TE, top_k=1, aux="batch")
    moved = route(logits_TE, top_k=1, aux="batch", load_E=plain.demand_E, threshold=1.0)
    assert moved.rerouted > 0
    assert torch.equal(moved.aux_loss, plain.aux_loss)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_global_balance_loss_is_that_of_all_batches_together(score):
    parts = torch.randn(3, 21, 8, dtype=torch.float64)
    demand_E = sum(route(part, top_k=2, score=score).demand_E for part in parts)
    share_E = demand_E / demand_E.sum()
    options = {"top_k": 2, "score": score}
    each = [route(part, aux="global", share_E=share_E, **options).aux_loss for part in parts]
    together = route(parts.flatten(0, 1), aux="batch", **options).aux_loss
    assert_close(torch.stack(each).mean(), together, check_dtype=False)
    alone = [route(part, aux="batch", **options).aux_loss for part in parts]
    assert abs(torch.stack(alone).mean() - together) > 1e-3


def test_z_loss_is_the_mean_squared_logsumexp():
    logits_TE = torch.randn(63, 8, dtype=torch.float64)
    expected = logits_TE.exp().sum(1).log().square().mean()
    assert_close(route(logits_TE, top_k=2).z_loss, expected)


@pytest.mark.parametrize("aux", ["batch", "sequence"])
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_in_fp64(score, normalize, aux):
    logits_TE = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)

    def run(logits_TE):
        routing = route(
            logits_TE,
            top_k=2,
            score=score,
            normalize=normalize,
            scale=1.5,
            aux=aux,
            num_sequences=2,
        )
        return routing.weight_TK, routing.aux_loss, routing.z_loss

    assert torch.autograd.gradcheck(run, logits_TE)


def test_zero_tokens():
    logits_TE = torch.randn(0, 4, requires_grad=True)
    routing = route(logits_TE, top_k=2, aux="batch", load_E=torch.ones(4), threshold=1.5)
    (routing.weight_TK.sum() + routing.aux_loss + routing.z_loss).backward()
    assert routing.offsets_E1.tolist() == [0] * 5
    assert (routing.aux_loss.item(), routing.z_loss.item()) == (0, 0)


def test_scores_that_all_underflow_give_zeros():
    logits_TE = torch.full((4, 6), -200.0, requires_grad=True)
    routing = route(logits_TE, top_k=2, score="sigmoid", normalize=True, aux="batch")
    (routing.weight_TK.sum() + routing.aux_loss).backward()
    assert torch.equal(routing.weight_TK, torch.zeros(4, 2))
    assert routing.aux_loss.item() == 0
    assert logits_TE.grad.isfinite().all()


def test_strided_logits():
    logits_TE = torch.randn(8, 63).T
    actual, expected = route(logits_TE, top_k=2), route(logits_TE.contiguous(), top_k=2)
    assert all(torch.equal(a, b) for a, b in zip(actual[:9], expected[:9], strict=True))


def _floats(**options):
    def run(logits_TE):
        routing = route(logits_TE, **options)
        return routing.weight_TK, routing.aux_loss, routing.z_loss

    return run


def test_compiles():
    options = {"top_k": 2, "score": "sigmoid", "normalize": True, "aux": "batch"}
    groups = {"num_groups": 2, "top_groups": 1, "bias_E": torch.rand(8)}
    assert_compiles(_floats(**options, **groups), {"logits_TE": torch.randn(9, 8)})


def test_compiled_decisions_are_the_same():
    logits_TE, load_E = torch.randn(9, 8), torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1])
    torch._dynamo.reset()
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    options = {"top_k": 2, "load_E": load_E, "threshold": 1.0, "depth": 2}
    actual, expected = compiled(logits_TE, **options), route(logits_TE, **options)
    assert all(torch.equal(a, b) for a, b in zip(actual[:9], expected[:9], strict=True))


def test_results_helper_sees_every_differentiable_field():
    named = results(_floats(top_k=2, aux="batch"), {"logits_TE": torch.randn(9, 8)}, torch.float32)
    assert list(named) == ["output 0", "output 1", "output 2", "gradient of logits_TE"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits_TE": torch.randn(2, 3, 8)}, r"logits has shape \(2, 3, 8\)"),
        ({"top_k": 0}, "top_k = 0, expected 1 to the number of experts 8"),
        ({"top_k": 9}, "top_k = 9"),
        ({"top_k": 2.0}, "top_k = 2.0, expected 1 to"),
        ({"top_k": "2"}, "top_k = '2', expected 1 to"),
        ({"score": "relu"}, "score = 'relu', expected one of softmax, sigmoid"),
        ({"aux": "token"}, "aux = 'token'"),
        ({"bias_E": torch.ones(7)}, r"bias has shape \(7,\)"),
        ({"load_E": torch.ones(7), "threshold": 2.0}, r"load has shape \(7,\)"),
        ({"load_E": torch.ones(8)}, "needs both threshold and load"),
        ({"threshold": 2.0}, "needs both threshold and load"),
        ({"num_groups": 3}, "8 experts do not split into num_groups = 3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups = 5, expected 1 to 4"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "exceeds the 2 experts of 1 groups"),
        ({"num_sequences": 4}, "6 tokens do not split into 4 sequences"),
        ({"num_sequences": 0}, "do not split into 0 sequences"),
        ({"aux": "global"}, "aux = 'global'; aux='global' and share go together"),
        ({"share_E": torch.ones(8)}, "aux = 'none'; aux='global' and share go together"),
        ({"share_E": torch.ones(7), "aux": "global"}, r"share has shape \(7,\)"),
        ({"logits_TE": torch.ones(6, 8, dtype=torch.int64)}, "logits has dtype torch.int64"),
        ({"bias_E": torch.ones(8, dtype=torch.int32)}, "bias has dtype torch.int32"),
        ({"bias_E": torch.ones(8, device="meta")}, "bias on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    device = torch.get_default_device()
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in arguments.items()
    }
    with pytest.raises(ShapeError, match=message):
        route(**{"logits_TE": torch.randn(6, 8), "top_k": 2, **arguments})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_logits_that_are_not_finite_are_named(bad):
    logits_TE = torch.randn(6, 8, device="cpu")  # a GPU does not look
    logits_TE[4, 3] = logits_TE[5, 0] = bad
    where = r"route: logits has 2 values that are not finite, the first at \(4, 3\)"
    with pytest.raises(ConfigError, match=where):
        route(logits_TE, top_k=2)
    assert route(logits_TE, top_k=2, check_values=False).expert_TK.max() < 8
