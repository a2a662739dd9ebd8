"""Does an arm train like the stock one? Loss curves on the same data, held to the spread of seeds.

For every seed both arms start from the same weights and see the same batches. In every window of
steps the mean curves of the arms may differ by no more than the stock arm's own seeds differ from
each other. Curves of single seeds drift apart where the loss falls fastest, whatever rounds
differently: ``paired`` says how far, and another stock arm beside shows that it is noise.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from typing import Any

import torch

from slipstream.bench.environment import environment
from slipstream.bench.ops_case import Missing
from slipstream.bench.results import Row
from slipstream.bench.step_arms import Setting, make_arm
from slipstream.bench.step_model import StepModel, learnable_tokens
from slipstream.errors import ConfigError

WINDOWS = 10
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRequest:
    """What to train."""

    model: StepModel
    arms: list[str]
    """The first one is the measure of the others."""
    device: torch.device
    steps: int
    seeds: int = 3
    lr: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """An arm's curves beside the first arm's."""

    difference: list[float]
    """Of a window's mean loss over steps and seeds."""
    spread: list[float]
    """Largest difference of a window's mean loss between two seeds of the first arm."""
    paired: list[float]
    """Largest difference of a window's mean loss from the same weights; not judged."""

    @property
    def within(self) -> bool:
        """Whether no window differs by more than seeds do; false for NaN and infinity."""
        pairs = zip(self.difference, self.spread, strict=True)
        return all(isfinite(spread) and difference <= spread for difference, spread in pairs)


def bench_curve(request: CurveRequest, say: Say) -> Generator[Row]:
    """Train every arm from every seed; yields one row per arm."""
    if request.seeds < 2:
        raise ConfigError(f"--seeds {request.seeds}: expected at least 2, their spread is measured")
    if request.steps < WINDOWS:
        raise ConfigError(f"--curve {request.steps}: expected at least {WINDOWS} steps")
    where = environment(request.device)
    data = learnable_tokens(request.model, request.steps)
    curves: dict[str, list[list[float]]] = {}
    for name in request.arms:
        row: Row = {"case": "step-curve", **request.model.row(), "dtype": "bfloat16"}
        row |= {"steps": request.steps, "seeds": request.seeds, "lr": request.lr, "arm": name}
        try:
            curves[name] = [_train(request, name, seed, data) for seed in range(request.seeds)]
        except Missing as missing:
            row |= {"status": "absent", "reason": str(missing)}
        # Whatever an arm raises, the others are still trained.
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {text}"}
        else:
            row |= _figures(curves, name, request.arms[0])
        say(f"  {name}: {row['status']} {row.get('reason', row.get('last_loss', ''))}")
        yield row | where


def windows(curve: list[float], count: int = WINDOWS) -> list[float]:
    """Means of ``count`` equal windows of a curve; a rest at its end is left out."""
    size = len(curve) // count
    return [sum(curve[i * size : (i + 1) * size]) / size for i in range(count)]


def agreement(curves: list[list[float]], stock: list[list[float]]) -> Agreement:
    """Hold the curves of an arm to those of the stock arm, from the same seeds."""
    own, theirs = ([windows(curve) for curve in found] for found in (curves, stock))
    pairs, places = list(zip(own, theirs, strict=True)), range(len(own[0]))
    return Agreement(
        difference=[abs(sum(a[i] - b[i] for a, b in pairs)) / len(pairs) for i in places],
        spread=[max(abs(a[i] - b[i]) for a, b in combinations(theirs, 2)) for i in places],
        paired=[max(abs(a[i] - b[i]) for a, b in pairs) for i in places],
    )


def _train(request: CurveRequest, name: str, seed: int, data: torch.Tensor) -> list[float]:
    if name == "slipstream-auto":
        raise Missing("recomputation has no budget here; compare slipstream")
    setting = Setting(
        model=request.model,
        device=request.device,
        seed=seed,
        lr=request.lr,
        tokens_BL=data[0].to(request.device),
    )
    arm = make_arm(name, setting)
    losses = []
    for tokens_BL in data:
        with arm.attention():
            loss = arm.loss(tokens_BL.to(request.device, non_blocking=True))
            arm.backward(loss)
        arm.update()
        losses.append(loss.detach())
    return torch.stack(losses).double().tolist()


def _figures(curves: dict[str, list[list[float]]], name: str, first: str) -> Row:
    means = [windows(curve) for curve in curves[name]]
    row: dict[str, Any] = {
        "status": "ok",
        "last_loss": [round(mean[-1], 5) for mean in means],
        "windows": [[round(value, 6) for value in mean] for mean in means],
    }
    if name == first or first not in curves:
        return row
    found = agreement(curves[name], curves[first])
    return row | {
        "compared_to": first,
        "difference": [float(f"{value:.4g}") for value in found.difference],
        "spread": [float(f"{value:.4g}") for value in found.spread],
        "paired": [float(f"{value:.4g}") for value in found.paired],
        "within": found.within,
    }
