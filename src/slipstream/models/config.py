"""What a decoder-only language model is made of: one config for every family that is supported."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from slipstream.config import Config, FloatOrInf
from slipstream.ops.activation import Activation
from slipstream.ops.moe.route import AuxScope, BalanceMode, Score
from slipstream.ops.norm import CastOrder, NormKind
from slipstream.ops.rope import RopeScaling, RopeSpec


class RopeConfig(Config):
    """Rotary position embedding."""

    theta: PositiveFloat = 10000.0
    """Base of the wavelengths."""
    scaling: RopeScaling = "none"
    """How positions beyond the original context are mapped."""
    factor: float = Field(1.0, ge=1.0)
    """Extension factor of the context."""
    original_len: PositiveInt = 8192
    """Context length before extension."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_len / this are stretched by factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_len / this are kept."""
    beta_fast: PositiveFloat = 32.0
    """yarn: dimensions that turn more often than this over original_len are kept."""
    beta_slow: PositiveFloat = 1.0
    """yarn: dimensions that turn less often than this are stretched by factor."""
    attention_factor: PositiveFloat | None = None
    """Multiplier of cos and sin; unset: the formula of the scaling."""
    long_factor: tuple[PositiveFloat, ...] = ()
    """longrope: divisors beyond original_len, one per pair of features."""
    short_factor: tuple[PositiveFloat, ...] = ()
    """longrope: divisors up to original_len, one per pair of features."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Share of each head that is rotated."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Each of these would divide by zero in the formula of its scaling.
        if self.scaling == "yarn" and self.theta <= 1.0:
            raise ValueError(f"theta = {self.theta} must be above 1 with scaling = yarn; raise it")
        if self.scaling == "longrope" and self.original_len <= 1:
            raise ValueError(
                f"original_len = {self.original_len} must be above 1 with scaling = longrope; "
                "set it to the context length before extension"
            )
        if self.scaling == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} must be below high_freq_factor = "
                f"{self.high_freq_factor} with scaling = llama3; lower the former"
            )
        return self


class BalanceConfig(Config):
    """Load balancing inside routing: experts above the threshold shed slots."""

    threshold: FloatOrInf = Field(float("inf"), ge=1.0)
    """Multiple of the mean load an expert may carry; inf turns balancing off. Counted in each
    micro-batch of each rank, so which slots move depends on how a step is split."""
    window: PositiveInt = 32
    """Steps over which the load is smoothed."""
    ramp: PositiveInt = 100
    """Steps over which the threshold comes down to its value."""
    depth: PositiveInt = 4
    """Rounds in which shed slots may try their next-best expert."""
    mode: BalanceMode = "weight"
    """What is shed: an expert's weakest slots, or (causal) its latest, so that a token's experts
    depend on earlier tokens only; causal takes more rounds, 8 rather than 4."""


class MoEConfig(Config):
    """A Mixture-of-Experts feed-forward block."""

    num_experts: PositiveInt
    """E: routed experts."""
    top_k: PositiveInt
    """K: experts per token."""
    d_ff: PositiveInt
    """F: hidden width of one expert."""
    every: PositiveInt = 1
    """Every n-th layer is MoE, counted after first_dense."""
    first_dense: int = Field(0, ge=0)
    """The first layers stay dense."""
    shared_d_ff: int = Field(0, ge=0)
    """Hidden width of the shared experts together; 0: none."""
    score: Score = "softmax"
    """Gate scores from logits."""
    normalize: bool = False
    """Scale the K weights of a token to sum 1."""
    scale: PositiveFloat = 1.0
    """Route scale: multiplies the weights."""
    num_groups: PositiveInt = 1
    """Group-limited routing: experts come in this many groups."""
    top_groups: PositiveInt = 1
    """Groups a token may use."""
    group_top: PositiveInt = 2
    """A group counts the sum of this many best scores."""
    expert_bias: bool = False
    """Aux-free balancing: a bias per expert, moved by the load, used for the choice only."""
    bias_update_rate: float = Field(1e-3, ge=0.0)
    """Step of that bias."""
    aux_loss: float = Field(0.0, ge=0.0)
    """Coefficient of the balance loss."""
    aux_scope: AuxScope = "sequence"
    """What that loss averages over: each sequence; or (batch) a whole micro-batch of one rank,
    which depends on how a step is split over ranks and micro-batches; or (global) a micro-batch
    too, but with the experts' shares of the slots of all ranks in the steps before, smoothed over
    the balance window."""
    z_loss: float = Field(0.0, ge=0.0)
    """Coefficient of the mean squared logsumexp of the router logits."""
    balance: BalanceConfig = BalanceConfig()
    """Load balancing inside routing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k = {self.top_k} exceeds num_experts = {self.num_experts}; lower top_k"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups = {self.num_groups} does not divide num_experts = {self.num_experts}"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"top_groups = {self.top_groups} exceeds num_groups = {self.num_groups}"
            )
        reachable = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > reachable:
            raise ValueError(
                f"top_k = {self.top_k} exceeds the {reachable} experts in top_groups groups"
            )
        return self


class ModelConfig(Config):
    """A decoder-only Transformer."""

    vocab_size: PositiveInt = 257
    """V: rows of the embedding; at least the tokenizer's size."""
    num_layers: PositiveInt = 4
    """Decoder layers."""
    d_model: PositiveInt = 256
    """D: width of the residual stream."""
    num_heads: PositiveInt = 4
    """H: query heads."""
    num_kv_heads: PositiveInt | None = None
    """G: key/value heads; unset: as many as query heads."""
    head_dim: PositiveInt | None = None
    """C: width of a head; unset: d_model / num_heads."""
    d_ff: PositiveInt = 1024
    """F: hidden width of a dense feed-forward block."""
    max_seq_len: PositiveInt = 2048
    """Longest sequence."""
    norm: NormKind = "rms"
    """Normalisation: rms or layer."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the variance."""
    norm_bias: bool = False
    """Bias in the norms."""
    norm_cast: CastOrder = "llama"
    """Where the norm rounds: before the weight (llama) or after it (fp32)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: per head, or over all heads together."""
    activation: Activation = "swiglu"
    """Activation of dense blocks and experts."""
    attention_bias: bool = False
    """Bias in the query, key and value projections."""
    attention_out_bias: bool = False
    """Bias in the output projection of attention."""
    mlp_bias: bool = False
    """Bias in dense feed-forward blocks."""
    clip_qkv: PositiveFloat | None = None
    """Clamp queries, keys and values to this magnitude."""
    rope: RopeConfig = RopeConfig()
    """Position embedding."""
    tie_embeddings: bool = False
    """One matrix for the input and the output embedding."""
    logit_softcap: PositiveFloat | None = None
    """Replace logits x by c * tanh(x / c)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights; projections back into the residual stream get
    init_std / sqrt(2 * num_layers)."""
    moe: MoEConfig | None = None
    """Mixture of Experts; unset: a dense model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model = {self.d_model} is not divisible by num_heads = {self.num_heads}; "
                "change one of them or set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = {self.kv_heads}"
            )
        self._check_rope()
        self._check_moe()
        return self

    def _check_rope(self) -> None:
        rope, turned = self.rope, self.rotary_dim
        least = 4 if rope.scaling == "dynamic" else 2
        if turned < least and rope.fraction < 1.0:
            raise ValueError(
                f"rope.fraction = {rope.fraction} turns {turned} of the {self.head_width} features "
                f"of a head, {least} are needed with rope.scaling = {rope.scaling}; "
                "raise rope.fraction or head_dim"
            )
        if turned % 2:
            raise ValueError(f"rope turns {turned} features of a head; make that an even number")
        if turned < least:
            raise ValueError(
                f"rope turns the {turned} features of a head, {least} are needed with "
                f"rope.scaling = {rope.scaling}; raise head_dim"
            )
        if rope.scaling == "longrope":
            for name in ("long_factor", "short_factor"):
                if len(getattr(rope, name)) != turned // 2:
                    raise ValueError(f"rope.{name} needs {turned // 2} numbers")

    def _check_moe(self) -> None:
        if self.moe is not None and not any(map(self.is_moe, range(self.num_layers))):
            raise ValueError(
                f"moe.first_dense = {self.moe.first_dense} leaves no MoE layer of num_layers = "
                f"{self.num_layers}; lower it, or leave out moe for a dense model"
            )

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """C."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return int(self.head_width * self.rope.fraction)

    def is_moe(self, layer: int) -> bool:
        """Whether the layer with this number (from 0) has experts."""
        if self.moe is None or layer < self.moe.first_dense:
            return False
        return (layer - self.moe.first_dense) % self.moe.every == 0

    def architecture(self) -> dict[str, Any]:
        """The dotted keys that trained weights depend on, without those of training alone."""
        flat: dict[str, Any] = {}
        for key, value in self.model_dump(exclude={"init_std", "max_seq_len"}).items():
            inner = value.items() if isinstance(value, dict) else ()
            flat.update({f"{key}.{name}": v for name, v in inner} or {key: value})
        for name in ("aux_loss", "aux_scope", "z_loss", "bias_update_rate", "balance"):
            flat.pop(f"moe.{name}", None)
        return flat

    def rope_spec(self) -> RopeSpec:
        """The arguments of ``rope_tables``."""
        values = self.rope.model_dump(exclude={"fraction"})
        return RopeSpec(head_dim=self.rotary_dim, **values)
