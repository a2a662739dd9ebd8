"""Activation memory of a run: the plan before the first step, and whether it held."""

from typing import Any

import torch

from slipstream import recompute
from slipstream.models import Transformer
from slipstream.parallel import Ranks
from slipstream.recompute import Plan
from slipstream.train.config import RunConfig

TOLERANCE = 0.05
"""Share by which the measured peak may miss the predicted one without a word."""


def plan_memory(config: RunConfig, model: Transformer, ranks: Ranks) -> Plan | None:
    """Have ``model`` recompute as ``config`` says; the plan, None if everything is kept.

    Rank 0 measures and decides for all. Call it once weights and optimizer have their memory.
    Raises ConfigError, on every rank, for a budget that cannot be met.
    """
    settings = config.recompute
    if settings.mode == "none":
        return None
    found: Plan | Exception | None = None
    if ranks.is_first:
        try:
            found = _decide(config, model, ranks)
        except Exception as error:
            # The other ranks wait for an answer, whatever it is.
            found = error
    found = ranks.from_first(found)
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Plan)
    recompute.apply(model, found)
    return found


def announcement(plan: Plan) -> list[str]:
    """What a plan says at the start of a run."""
    if plan.predicted_gib is not None:
        return ["recompute:", *recompute.lines(plan)]
    counts: dict[str, int] = {}
    for action in plan.actions.values():
        counts[action] = counts.get(action, 0) + 1
    given = ", ".join(f"{n} x {name}" for name, n in sorted(counts.items()) if name != "keep")
    return [f"recompute: {given}"]


def deviation(plan: Plan | None, measured_gib: float, device: torch.device) -> str | None:
    """A line on a measured peak that is not the predicted one; None if it is, or on a CPU.

    On a CPU the prediction counts tensors and the measurement the whole process.
    """
    if plan is None or plan.predicted_gib is None or device.type != "cuda":
        return None
    off = measured_gib / plan.predicted_gib - 1
    line = (
        f"recompute: measured peak {measured_gib:.2f} GiB, predicted {plan.predicted_gib:.2f} "
        f"({100 * off:+.1f}%)"
    )
    if abs(off) <= TOLERANCE:
        return line
    return f"WARNING: {line}; lower recompute.budget_gib if memory runs out"


def _decide(config: RunConfig, model: Transformer, ranks: Ranks) -> Plan:
    settings = config.recompute
    if settings.mode != "auto":
        return recompute.fixed(model, settings.mode)
    assert settings.budget_gib is not None
    was_training = model.training
    model.train()
    try:
        return recompute.plan(
            model,
            _sample(config, ranks),
            settings.budget_gib,
            # A recorded graph has no copies to the host.
            offload=not config.train.cuda_graph,
            accumulate=0 < config.train.micro_batch < config.sequences_per_step // ranks.world,
        )
    finally:
        model.train(was_training)


def _sample(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    # The data is not open yet. What the tokens are matters little: routing has room for any.
    sequences = config.train.micro_batch or config.sequences_per_step // ranks.world
    generator = torch.Generator().manual_seed(config.train.seed)
    shape = (sequences, config.data.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator).to(ranks.device)
    document = torch.zeros_like(tokens) if config.data.mask_documents else None
    return {"tokens_BL": tokens, "targets_BL": tokens, "document_BL": document}
