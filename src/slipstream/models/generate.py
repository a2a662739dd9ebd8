"""Continue token sequences with a model.

Every token runs the whole prefix again (no key/value cache): meant for looking at a model while it
trains; export it to serve it.
"""

import torch

from slipstream.errors import ConfigError
from slipstream.models.transformer import Transformer


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

    ``temperature`` 0 takes the likeliest token; ``top_p`` samples from the smallest set of tokens
    with that probability. Prefixes longer than the model's context lose their start.
    Raises ConfigError.
    """
    if not tokens:
        raise ConfigError("--prompt is empty; give at least one token")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"--temperature {temperature} must be 0 or more and --top-p {top_p} in (0, 1]"
        )
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


def _pick(
    logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probability, index = (logits_V / temperature).softmax(-1).sort(descending=True, stable=True)
    before = probability.cumsum(0) - probability
    probability = probability.where(before < top_p, 0.0)
    return int(index[torch.multinomial(probability, 1, generator=generator)])
