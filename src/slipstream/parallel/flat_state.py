"""AdamW state of one flat bucket, and its update."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import CheckpointError, TrainingError
from slipstream.ops import AdamWOptions, adamw, triton_support
from slipstream.ops.scattered import Scattered
from slipstream.parallel.flat_storage import Bucket

State = dict[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the norm of all gradients decides, as scalar tensors on the device."""

    divisor: torch.Tensor | None = None
    """fp32: divides the gradients."""
    skip: torch.Tensor | None = None
    """bool: change nothing."""


class FlatState:
    """Moments and step count of a bucket; its gradients too, if they are to be flat."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        moments: torch.dtype = torch.float32,
        flat_grads: bool = False,
    ) -> None:
        self.bucket = bucket
        self.exp_avg, self.exp_avg_sq = bucket.zeros(moments), bucket.zeros(moments)
        self.step = torch.zeros((), dtype=torch.float32, device=bucket.data.device)
        self.grad: torch.Tensor | None = None
        self._grad_version = 0
        if flat_grads:
            wide = torch.float32 if bucket.master is not None else bucket.data.dtype
            self.grad = bucket.zeros(wide)
            self._attach(self.grad)

    @property
    def one_pass(self) -> bool:
        """Whether the bucket is updated as a whole.

        On a CPU each tensor by itself gives the bits that separate tensors give.
        """
        on_cpu = self.step.device.type == "cpu" and not triton_support.interpreting()
        return not on_cpu or self.bucket.interleaved

    def grads(self) -> torch.Tensor | Scattered | None:
        """The gradients of this step; None if no parameter has one."""
        if self.grad is None:
            return self.bucket.scattered()
        frozen = next((p for p in self.bucket.params if not p.requires_grad), None)
        if frozen is not None:
            raise TrainingError(
                f"FlatAdamW: a parameter of shape {tuple(frozen.shape)} was frozen after the "
                "optimizer was made, and flat gradients would go on moving it; use "
                "gradients='separate', or make the optimizer anew"
            )
        self._attach(self.grad)
        return self.grad

    def zero_grad(self) -> None:
        """Zeros in flat gradients, unless the step left them and nothing was added since."""
        assert self.grad is not None
        self._attach(self.grad)
        if self.grad._version != self._grad_version:
            self.grad.zero_()
            self._grad_version = self.grad._version

    def of_each(self) -> list[tuple[nn.Parameter, State]]:
        """Every parameter and its state under the names of ``torch.optim.AdamW``, as views."""
        names = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.bucket.master is not None:
            names["master"] = self.bucket.master
        views = {name: self.bucket.views(flat) for name, flat in names.items()}
        return [
            (param, {"step": self.step, **{name: views[name][i] for name in views}})
            for i, param in enumerate(self.bucket.params)
        ]

    def check_each(self, states: Sequence[State | None]) -> None:
        """Raise CheckpointError unless these are states of AdamW for the parameters."""
        steps = {float(state.get("step", 0.0)) for state in states if state is not None}
        if len(steps) > 1:
            raise CheckpointError(
                f"optimizer state: parameters of one group have step counts {sorted(steps)}; flat "
                "buckets count for all of them, so give these parameters groups of their own"
            )
        for param, given in zip(self.bucket.params, states, strict=True):
            if given is None:
                continue
            missing = [name for name in ("step", *MOMENTS) if name not in given]
            if missing:
                raise CheckpointError(
                    f"optimizer state: {missing[0]} is missing for a parameter of shape "
                    f"{tuple(param.shape)}; load the state of an AdamW"
                )
            for name in (*MOMENTS, "master"):
                value = given.get(name)
                if value is not None and value.shape != param.shape:
                    raise CheckpointError(
                        f"optimizer state: {name} has shape {tuple(value.shape)}, its parameter "
                        f"{tuple(param.shape)}; load the state of the same model"
                    )

    @torch.no_grad()
    def load_each(self, states: Sequence[State | None]) -> None:
        """Take over the states of all parameters, from this class or ``torch.optim.AdamW``.

        None: as in a new optimizer. A missing master is the parameter's value. Raises
        CheckpointError, with nothing changed.
        """
        self.check_each(states)
        counts = (float(state["step"]) for state in states if state is not None)
        self.step.fill_(next(counts, 0.0))
        for (param, mine), given in zip(self.of_each(), states, strict=True):
            for name, view in mine.items():
                value = None if given is None else given.get(name)
                if name == "step":
                    continue
                if value is not None:
                    view.copy_(value)
                elif name == "master":
                    view.copy_(param.detach())
                else:
                    view.zero_()
        self.bucket.note_versions()

    def note_zeros(self) -> None:
        """Flat gradients have just been left zeroed."""
        if self.grad is not None:
            self._grad_version = self.grad._version

    @torch.no_grad()
    def _attach(self, flat: torch.Tensor) -> None:
        # Whoever set a gradient to None or made another one is followed.
        for param, view in zip(self.bucket.params, self.bucket.views(flat), strict=True):
            grad = param.grad
            if grad is not None and grad.data_ptr() == view.data_ptr():
                continue
            view.zero_() if grad is None else view.copy_(grad)
            if param.dtype != flat.dtype:
                param.grad = None
                param.grad_dtype = flat.dtype
            param.grad = view


def update(states: Sequence[FlatState], options: AdamWOptions, decision: Decision) -> None:
    """One step of buckets in place; parameters without a gradient stay as they are."""
    for wide in (False, True):
        alike = [state for state in states if (state.bucket.master is not None) == wide]
        have = [(state, grad) for state in alike if (grad := state.grads()) is not None]
        at_once = [pair for pair in have if pair[0].one_pass or options.rounding == "stochastic"]
        if at_once:
            _update_buckets(at_once, options, decision, masters=wide)
        for state, _ in have:
            if all(state is not done for done, _ in at_once):
                _update_each(state, options, decision)
            state.note_zeros()


def _update_buckets(
    have: list[tuple[FlatState, torch.Tensor | Scattered]],
    options: AdamWOptions,
    decision: Decision,
    *,
    masters: bool,
) -> None:
    states, grads = [state for state, _ in have], [grad for _, grad in have]
    adamw(
        [state.bucket.data for state in states],
        grads,
        [state.exp_avg for state in states],
        [state.exp_avg_sq for state in states],
        [state.step for state in states],
        masters=[m for s in states if (m := s.bucket.master) is not None] if masters else None,
        options=options,
        grad_divisor=decision.divisor,
        skip=decision.skip,
    )


def _update_each(state: FlatState, options: AdamWOptions, decision: Decision) -> None:
    bucket = state.bucket
    have = [i for i, param in enumerate(bucket.params) if param.grad is not None]

    def parts(flat: torch.Tensor) -> list[torch.Tensor]:
        views = bucket.views(flat)
        return [views[i] for i in have]

    steps = [state.step.clone() for _ in have]
    adamw(
        parts(bucket.data),
        [grad for param in bucket.params if (grad := param.grad) is not None],
        parts(state.exp_avg),
        parts(state.exp_avg_sq),
        steps,
        masters=None if bucket.master is None else parts(bucket.master),
        options=options,
        grad_divisor=decision.divisor,
        skip=decision.skip,
    )
    state.step.copy_(steps[0])
