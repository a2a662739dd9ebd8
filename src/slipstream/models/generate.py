"""Continue token sequences with a model.

Every token runs the whole prefix again (no key/value cache): meant for looking at a model while it
trains; export it to serve it.
"""

import math

import torch

from slipstream.errors import ConfigError
from slipstream.models.transformer import Transformer

GREEDY_BELOW = 1e-5
"""Below this temperature logits 0.001 apart differ by e^100 in probability: sampling is greedy, and
dividing by it could overflow."""


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: list[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """``count`` tokens after ``tokens``, fewer if ``stop`` comes up (it is not returned).

    ``temperature`` 0 (or below GREEDY_BELOW) takes the likeliest token; ``top_p`` samples from the
    smallest set of tokens with that probability. Prefixes longer than the model's context lose
    their start. Raises ConfigError.
    """
    check_sampling(temperature, top_p, seed)
    if not tokens:
        raise ConfigError("--prompt is empty; give at least one token")
    device = model.embed.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    context, made = list(tokens), []
    for _ in range(count):
        window = torch.tensor([context[-model.config.max_seq_len :]], device=device)
        logits_V = model(window).logits[0, -1]
        token = _pick(logits_V, temperature, top_p, generator)
        if token == stop:
            break
        context.append(token)
        made.append(token)
    return made


def check_sampling(temperature: float, top_p: float, seed: int) -> None:
    """ConfigError unless ``generate`` can sample with these."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"--temperature {temperature}: give a finite number, 0 or more; try 0.8")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p}: give a number above 0 and at most 1; 1 is no limit")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {seed}: give a whole number from 0 to 2^63 - 1")


def _pick(
    logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    if temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    probability, index = (logits_V / temperature).softmax(-1).sort(descending=True, stable=True)
    kept = probability.cumsum(0) - probability < top_p
    # A top_p that is 0 in fp32 still keeps the likeliest.
    kept[0] = True
    probability = probability.where(kept, 0.0)
    return int(index[torch.multinomial(probability, 1, generator=generator)])
