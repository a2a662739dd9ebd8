"""Which Hugging Face tensors make up each of ours.

Every parameter of ours is, in memory, a plain concatenation of theirs along the first dimension:
``wqkv`` is q, k, v; ``w13`` is gate, up; stacked experts are expert after expert. So a weight is a
list of pieces, read and written one at a time, and the same list maps gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One Hugging Face tensor."""

    name: str
    """Its name."""
    shape: tuple[int, ...]
    """Its shape."""


Layout = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One of our parameters."""

    name: str
    """Its name in ``Transformer.state_dict``."""
    layouts: tuple[Layout, ...]
    """Equivalent ways to store it; the first is written, all are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How a family calls the parts of an MoE block."""

    blocks: tuple[str, ...]
    """Name of the block in a layer: as written, then others that are read."""
    gate: str = "gate_proj"
    """First projection, through the activation."""
    up: str = "up_proj"
    """Second projection."""
    down: str = "down_proj"
    """Projection back."""


def weight_map(config: ModelConfig, experts: ExpertNames | None) -> list[Weight]:
    """Every parameter of a model of ``config``, in forward order."""
    table = (config.vocab_size, config.d_model)
    embed = _stored("model.embed_tokens.weight", *table)
    head = _stored("lm_head.weight", *table)
    # A file written with shared tensors merged may keep only the other name of a tied matrix.
    tied = config.tie_embeddings
    weights = [Weight(name="embed.weight", layouts=(embed, head) if tied else (embed,))]
    for index in range(config.num_layers):
        weights += _layer(config, index, experts)
    weights.append(_same("norm.weight", "model.norm.weight", config.d_model))
    if not tied:
        weights.append(Weight(name="head.weight", layouts=(head,)))
    return weights


def _layer(config: ModelConfig, index: int, experts: ExpertNames | None) -> Iterator[Weight]:
    ours, theirs = f"layers.{index}.", f"model.layers.{index}."
    width, attention = config.head_width, theirs + "self_attn."
    query, key = config.num_heads * width, config.kv_heads * width
    yield _same(ours + "attention_norm.weight", theirs + "input_layernorm.weight", config.d_model)
    parts = [
        (attention + "q_proj", query),
        (attention + "k_proj", key),
        (attention + "v_proj", key),
    ]
    yield from _linear(ours + "attention.wqkv", parts, config.d_model, config.attention_bias)
    out = [(attention + "o_proj", config.d_model)]
    yield from _linear(ours + "attention.wo", out, query, config.attention_out_bias)
    if config.qk_norm != "none":
        rows = (width, width) if config.qk_norm == "head" else (query, key)
        for name, size in zip(("q_norm", "k_norm"), rows, strict=True):
            yield _same(f"{ours}attention.{name}.weight", f"{attention}{name}.weight", size)
    yield _same(
        ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight", config.d_model
    )
    if config.is_moe(index):
        assert experts is not None, "the family was checked to have experts"
        yield from _moe(config, ours + "moe.", theirs, experts)
    else:
        yield from _mlp(config, ours + "mlp.", theirs + "mlp.")


def _mlp(config: ModelConfig, ours: str, theirs: str) -> Iterator[Weight]:
    hidden, bias = config.d_ff, config.mlp_bias
    parts = [(theirs + "gate_proj", hidden), (theirs + "up_proj", hidden)]
    yield from _linear(ours + "w13", parts, config.d_model, bias)
    yield from _linear(ours + "w2", [(theirs + "down_proj", config.d_model)], hidden, bias)


def _moe(config: ModelConfig, ours: str, theirs: str, names: ExpertNames) -> Iterator[Weight]:
    moe, dim = config.moe, config.d_model
    assert moe is not None
    count, hidden = moe.num_experts, moe.d_ff
    blocks = [theirs + block for block in names.blocks]
    router = tuple(_stored(f"{block}.gate.weight", count, dim) for block in blocks)
    yield Weight(name=ours + "router", layouts=router)
    in_projections = (names.gate, names.up)
    yield Weight(
        name=ours + "w13",
        layouts=(
            *(_each(block, count, in_projections, (hidden, dim)) for block in blocks),
            *(_stored(f"{block}.experts.gate_up_proj", count, 2 * hidden, dim) for block in blocks),
        ),
    )
    yield Weight(
        name=ours + "w2",
        layouts=(
            *(_each(block, count, (names.down,), (dim, hidden)) for block in blocks),
            *(_stored(f"{block}.experts.down_proj", count, dim, hidden) for block in blocks),
        ),
    )


def _each(block: str, count: int, names: Sequence[str], shape: tuple[int, int]) -> Layout:
    return tuple(
        Piece(name=f"{block}.experts.{expert}.{name}.weight", shape=shape)
        for expert in range(count)
        for name in names
    )


def _linear(
    ours: str, parts: Sequence[tuple[str, int]], in_features: int, bias: bool
) -> Iterator[Weight]:
    rows = tuple(Piece(name=f"{name}.weight", shape=(size, in_features)) for name, size in parts)
    yield Weight(name=ours + ".weight", layouts=(rows,))
    if bias:
        biases = tuple(Piece(name=f"{name}.bias", shape=(size,)) for name, size in parts)
        yield Weight(name=ours + ".bias", layouts=(biases,))


def _same(ours: str, theirs: str, size: int) -> Weight:
    return Weight(name=ours, layouts=(_stored(theirs, size),))


def _stored(name: str, *shape: int) -> Layout:
    return (Piece(name=name, shape=shape),)
