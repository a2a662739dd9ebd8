"""Learning rate as a pure function of the step, so that a resumed run needs no schedule state."""

import math

from slipstream.train.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``steps``."""
    warmup = min(config.warmup_steps, steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * _remaining(config, step, warmup, steps)


def _remaining(config: OptimConfig, step: int, warmup: int, steps: int) -> float:
    # 1 at the end of warm-up; the last step reaches 0 exactly.
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        done = (step - warmup + 1) / max(1, steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * done))
    decay = max(1, min(round(config.decay_fraction * steps), steps - warmup))
    return min(1.0, (steps - 1 - step) / decay)
