"""The MoE layer all peers run: shapes, weights, tokens, a chosen skew, and the truth in fp64.

Letters: T tokens, D width, F expert hidden, E experts, K experts per token.

Skew goes through the router itself, so that every peer meets it: one input column is constant and
the router's weights of that column favour experts such that, as when K experts are drawn without
replacement with probabilities proportional to 1 / rank^s (Zipf), rank r is chosen as often.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import ConfigError
from slipstream.verify.budget import Results

INPUT_STD, WEIGHT_STD = 0.2, 0.02
MAX_DRAWS = 200
FIT_STEPS, FIT_RATE = 100, 0.3
POPULARITY_DRAWS = 16384
DENSE_CHUNK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """One layer."""

    name: str
    """Preset name, or the numbers."""
    tokens: int
    """T."""
    width: int
    """D."""
    hidden: int
    """F."""
    experts: int
    """E."""
    top_k: int
    """K."""

    @property
    def flops(self) -> float:
        """Forward and backward of the experts' three products: 18*T*K*F*D; no router."""
        return 18.0 * self.tokens * self.top_k * self.hidden * self.width


_PRESETS = {
    "olmoe": (32768, 2048, 1024, 64, 8),
    "qwen3-30b": (32768, 2048, 768, 128, 8),
    "wide": (32768, 4096, 1024, 128, 8),
    "mixtral": (16384, 4096, 14336, 8, 2),
}
SHORT_TOKENS = 4096


def shape(name: str, *numbers: int) -> MoeShape:
    """A shape from its five numbers T, D, F, E, K."""
    tokens, width, hidden, experts, top_k = numbers
    return MoeShape(
        name=name, tokens=tokens, width=width, hidden=hidden, experts=experts, top_k=top_k
    )


SHAPES = {name: shape(name, *numbers) for name, numbers in _PRESETS.items()} | {
    f"{name}-short": shape(f"{name}-short", SHORT_TOKENS, *numbers[1:])
    for name, numbers in _PRESETS.items()
}


def parse_shape(text: str) -> MoeShape:
    """A preset's name, or ``T,D,F,E,K``. Raises ConfigError."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(",")
    if len(parts) != 5 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--shape {text}: expected T,D,F,E,K or one of {', '.join(SHAPES)}")
    found = shape(text, *(int(part) for part in parts))
    if min(found.tokens, found.width, found.hidden, found.experts, found.top_k) < 1:
        raise ConfigError(f"--shape {text}: every number must be at least 1")
    if found.top_k > found.experts:
        raise ConfigError(f"--shape {text}: K = {found.top_k} exceeds E = {found.experts}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs and weights that all peers share, and the gradient that comes in."""

    shape: MoeShape
    skew: float
    leaves: dict[str, nn.Parameter]
    """x (T, D), router (E, D), w13 (E, 2F, D) gates first, w2 (E, D, F)."""
    dout_TD: torch.Tensor
    """Gradient of the output."""
    load_E: torch.Tensor
    """int64: slots per expert of plain top-k, in fp64."""

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and weights."""
        return self.dout_TD.dtype

    @property
    def device(self) -> torch.device:
        """Of everything."""
        return self.dout_TD.device

    @property
    def max_over_mean(self) -> float:
        """Load of the busiest expert over the mean load."""
        return (self.load_E.max() / self.load_E.double().mean()).item()


def make_problem(
    shape: MoeShape, *, skew: float, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Problem:
    """Random weights and tokens; no token's choice of experts hangs on rounding of its logits."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(std: float, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, device=device, dtype=dtype).mul_(std)

    router_ED = normal(WEIGHT_STD, shape.experts, shape.width)
    x_TD = normal(INPUT_STD, shape.tokens, shape.width)
    if skew:
        x_TD[:, 0], router_ED[:, 0] = 1.0, 0.0
        logits_TE = x_TD.double() @ router_ED.double().T
        target_E = zipf_popularity(shape.experts, shape.top_k, skew, draw)
        router_ED[:, 0] = fit_bias(logits_TE, shape.top_k, target_E).to(dtype)
    logits_TE = _settle_choices(x_TD, router_ED, shape.top_k, skew, draw)
    chosen_TK = logits_TE.topk(shape.top_k, dim=1)[1]
    leaves = {
        "x": x_TD,
        "router": router_ED,
        "w13": normal(WEIGHT_STD, shape.experts, 2 * shape.hidden, shape.width),
        "w2": normal(WEIGHT_STD, shape.experts, shape.width, shape.hidden),
    }
    return Problem(
        shape=shape,
        skew=skew,
        leaves={name: nn.Parameter(tensor) for name, tensor in leaves.items()},
        dout_TD=normal(INPUT_STD, shape.tokens, shape.width),
        load_E=chosen_TK.flatten().bincount(minlength=shape.experts),
    )


def zipf_popularity(experts: int, top_k: int, s: float, draw: torch.Generator) -> torch.Tensor:
    """fp64 (E,): share of tokens that choose each expert; which expert is hot is random."""
    ranks = torch.arange(1, experts + 1, device=draw.device, dtype=torch.float64)
    uniform = torch.rand(
        POPULARITY_DRAWS, experts, generator=draw, device=draw.device, dtype=torch.float64
    )
    # The K largest of log p + Gumbel noise are a draw without replacement.
    keys = -s * ranks.log() - (-uniform.clamp(min=1e-300).log()).log()
    counts = keys.topk(top_k, dim=1)[1].flatten().bincount(minlength=experts)
    order = torch.randperm(experts, generator=draw, device=draw.device)
    return counts[order].double() / POPULARITY_DRAWS


def fit_bias(logits_TE: torch.Tensor, top_k: int, target_E: torch.Tensor) -> torch.Tensor:
    """The bias per expert under which the top-k of ``logits`` is as popular as ``target`` says."""
    tokens, experts = logits_TE.shape
    spread = logits_TE.std().item()
    bias_E = torch.zeros(experts, device=logits_TE.device, dtype=torch.float64)
    wanted_E = (target_E * tokens + 0.5).log() - ((1 - target_E) * tokens + 0.5).log()
    for _ in range(FIT_STEPS):
        chosen = (logits_TE + bias_E).topk(top_k, dim=1)[1].flatten()
        count_E = chosen.bincount(minlength=experts)
        odds_E = (count_E + 0.5).log() - (tokens - count_E + 0.5).log()
        bias_E += FIT_RATE * spread * (wanted_E - odds_E)
    return bias_E - bias_E.mean()


def _settle_choices(
    x_TD: torch.Tensor, router_ED: torch.Tensor, top_k: int, skew: float, draw: torch.Generator
) -> torch.Tensor:
    # Redraws tokens whose K-th and next logit lie closer than rounding both to the dtype could
    # cross; otherwise a peer with 16-bit logits would be wrong for choosing other experts.
    wide = router_ED.double().T
    logits_TE = x_TD.double() @ wide
    if top_k == router_ED.shape[0]:
        return logits_TE
    unit = torch.finfo(x_TD.dtype).eps
    for _ in range(MAX_DRAWS):
        best = logits_TE.topk(top_k + 1, dim=1)[0]
        near = best[:, -2] - best[:, -1] <= 2 * unit * logits_TE.abs().amax(1)
        rows = near.nonzero().flatten()
        if not len(rows):
            return logits_TE
        size = (len(rows), x_TD.shape[1])
        fresh = torch.randn(size, generator=draw, device=x_TD.device, dtype=x_TD.dtype)
        fresh.mul_(INPUT_STD)
        if skew:
            fresh[:, 0] = 1.0
        x_TD[rows] = fresh
        logits_TE[rows] = fresh.double() @ wide
    raise ConfigError(f"no tokens with clear choices in {MAX_DRAWS} draws; take a larger width D")


def plain_layer(problem: Problem, run_in: torch.dtype) -> Results:
    """Output and gradients of the layer as plain PyTorch, expert by expert, all in ``run_in``.

    In fp64 it is the truth, in the problem's dtype the eager code that sets the error budget.
    """
    shape = problem.shape
    x_TD, router_ED = (_leaf(problem.leaves[name], run_in) for name in ("x", "router"))
    # Leaves per expert: the gradient of a slice would be as large as all experts.
    w13, w2 = ([_leaf(w, run_in) for w in problem.leaves[name]] for name in ("w13", "w2"))
    wide = torch.promote_types(run_in, torch.float32)
    prob_TE = F.softmax(x_TD @ router_ED.T, dim=-1, dtype=wide)
    weight_TK, expert_TK = prob_TE.topk(shape.top_k, dim=1)
    weight_TK = (weight_TK / weight_TK.sum(1, keepdim=True)).to(run_in)
    out_TD = torch.zeros_like(x_TD)
    for expert in range(shape.experts):
        token, slot = (expert_TK == expert).nonzero(as_tuple=True)
        rows = checkpoint(
            _one_expert,
            x_TD,
            w13[expert],
            w2[expert],
            token,
            weight_TK[token, slot],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        out_TD.index_add_(0, token, rows)
    leaves = [x_TD, router_ED, *w13, *w2]
    grads = torch.autograd.grad(out_TD, leaves, problem.dout_TD.to(run_in))
    stacked = torch.stack(grads[2 : 2 + shape.experts]), torch.stack(grads[2 + shape.experts :])
    return named_results(out_TD, dict(zip(problem.leaves, (*grads[:2], *stacked), strict=True)))


def _one_expert(
    x_TD: torch.Tensor,
    w13_PD: torch.Tensor,
    w2_DF: torch.Tensor,
    token: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    return gated_mlp(x_TD.index_select(0, token), w13_PD, w2_DF) * weight[:, None]


def gated_mlp(x_TD: torch.Tensor, w13_PD: torch.Tensor, w2_DF: torch.Tensor) -> torch.Tensor:
    """SwiGLU of one dense or expert MLP; gates are the first half of the rows of ``w13``."""
    gate, up = F.linear(x_TD, w13_PD).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2_DF)


def plain_dense(
    leaves: dict[str, nn.Parameter], dout_TD: torch.Tensor, run_in: torch.dtype
) -> Results:
    """Output and gradients of one dense SwiGLU MLP (x, w13, w2) in ``run_in``."""
    x_TD, w13, w2 = (_leaf(leaf, run_in) for leaf in leaves.values())
    out_TD = torch.cat(
        [
            checkpoint(gated_mlp, rows, w13, w2, use_reentrant=False, preserve_rng_state=False)
            for rows in x_TD.split(DENSE_CHUNK if run_in == torch.float64 else len(x_TD))
        ]
    )
    grads = torch.autograd.grad(out_TD, (x_TD, w13, w2), dout_TD.to(run_in))
    return named_results(out_TD, dict(zip(leaves, grads, strict=True)))


def named_results(out_TD: torch.Tensor, grads: dict[str, torch.Tensor]) -> Results:
    """The tensors a layer is held to."""
    return {"output": out_TD.detach(), **{f"gradient of {name}": g for name, g in grads.items()}}


def _leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Cloned: the caller's parameter must not become the leaf of another graph.
    return tensor.detach().to(dtype, copy=True).requires_grad_()
