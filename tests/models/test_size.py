"""Counted parameters and FLOPs against real modules and real matrix products."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from slipstream.models import ModelConfig, Transformer, size, train_flops_per_token

BOOL = st.booleans()
MOE = st.fixed_dictionaries(
    {
        "num_experts": st.integers(2, 5),
        "top_k": st.integers(1, 2),
        "d_ff": st.integers(1, 9),
        "every": st.integers(1, 3),
        "first_dense": st.integers(0, 5),
        "shared_d_ff": st.sampled_from([0, 7]),
        "expert_bias": BOOL,
    }
)


def with_a_moe_layer(values: dict[str, Any]) -> dict[str, Any]:
    moe = values["moe"]
    if moe is None:
        return values
    return values | {"moe": moe | {"first_dense": moe["first_dense"] % values["num_layers"]}}


CONFIGS = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(1, 40),
        "num_layers": st.integers(1, 4),
        "d_model": st.sampled_from([8, 24]),
        "num_heads": st.sampled_from([2, 4]),
        "num_kv_heads": st.sampled_from([None, 1, 2]),
        "head_dim": st.sampled_from([None, 6]),
        "d_ff": st.integers(1, 30),
        "norm": st.sampled_from(["rms", "layer"]),
        "norm_bias": BOOL,
        "qk_norm": st.sampled_from(["none", "head", "full"]),
        "activation": st.sampled_from(["swiglu", "gelu", "relu2", "geglu"]),
        "attention_bias": BOOL,
        "attention_out_bias": BOOL,
        "mlp_bias": BOOL,
        "tie_embeddings": BOOL,
        "moe": st.none() | MOE,
    }
).map(with_a_moe_layer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CONFIGS)
def test_size_equals_the_parameters_of_the_model(values: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(values)
    with torch.device("meta"):
        model = Transformer(config)
    counted = size(config)
    assert counted.total == sum(p.numel() for p in model.parameters())
    idle = 0
    for block in model.moe_layers().values():
        experts = block.w13.shape[0]
        idle += (block.w13.numel() + block.w2.numel()) // experts * (experts - block.top_k)
    look_up = 0 if config.tie_embeddings else model.embed.weight.numel()
    assert counted.active == counted.total - idle - look_up


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flops_are_those_of_the_products_of_a_dense_model(kv_heads: int) -> None:
    config = ModelConfig(
        vocab_size=40, num_layers=2, d_model=32, num_heads=4, num_kv_heads=kv_heads, d_ff=48
    )
    batch, length = 2, 16
    model = Transformer(config)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op)
    )
    # Weights are all matrices but the norms, which no product counts; attention is apart.
    norms = (2 * config.num_layers + 1) * config.d_model
    attention = 6 * config.num_layers * config.num_heads * config.head_width * length
    expected = train_flops_per_token(config, length) - attention - 6 * norms
    assert products == expected * batch * length


def test_attention_is_half_of_its_square() -> None:
    config = ModelConfig(num_layers=3, d_model=64, num_heads=4, head_dim=8)
    grown = train_flops_per_token(config, 2048) - train_flops_per_token(config, 1024)
    # Scores and values: 2 products of 2 * C FLOPs per pair and head, 3 with backward, half masked.
    assert grown == 3 * 2 * 2 * 8 * 4 * 3 * 1024 / 2


def test_idle_experts_cost_nothing() -> None:
    moe = {"num_experts": 8, "top_k": 2, "d_ff": 16}
    few = ModelConfig.model_validate({"moe": moe})
    many = ModelConfig.model_validate({"moe": {**moe, "num_experts": 64}})
    router = 4 * 56 * 256
    assert size(many).active - size(few).active == router
    assert size(many).total - size(few).total == router + 4 * 56 * 3 * 16 * 256
