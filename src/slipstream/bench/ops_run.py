"""One peer on the tensors of a case: the calls that are timed, what goes before them, its results.

Every call finds its inputs and upstream gradients as they were drawn, in the same memory: some
peers write gradients over what they were given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.bench.ops_case import Draw, Function, OpCase
from slipstream.verify.budget import Results, cast, named_outputs, with_gradients


class Tensors:
    """The tensors of one case, shared by its peers."""

    def __init__(self, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
        self.case = case
        draw = Draw(generator=torch.Generator(device).manual_seed(0), dtype=dtype)
        drawn = case.inputs(draw)
        self.inputs = {
            name: tensor.requires_grad_(name in case.wanted) for name, tensor in drawn.items()
        }
        self.upstream: list[torch.Tensor] = []
        if case.wanted:
            with torch.no_grad():
                outputs = named_outputs(case.plain(**self.inputs))
            self.upstream = [
                torch.ones_like(out) if case.scalar else draw.normal(*out.shape, dtype=out.dtype)
                for out in outputs.values()
            ]
        self._drawn = [tensor.detach().clone() for tensor in self._all()]

    def restore(self) -> None:
        """Make every tensor what it was."""
        with torch.no_grad():
            for tensor, drawn in zip(self._all(), self._drawn, strict=True):
                tensor.copy_(drawn)

    def evaluate(self, function: Function, run_in: torch.dtype | None = None) -> Results:
        """Outputs and gradients, or the changed inputs, of copies of the tensors in ``run_in``."""
        self.restore()
        leaves = {}
        for name, tensor in self.inputs.items():
            copy = tensor.detach().clone() if run_in is None else _cast(tensor, run_in)
            leaves[name] = copy.requires_grad_(name in self.case.wanted)
        if self.case.changes:
            function(**leaves)
            return {name: leaves[name] for name in self.case.changes}
        outputs = named_outputs(function(**leaves))
        grads = [
            grad.to(out.dtype, copy=True)
            for grad, out in zip(self.upstream, outputs.values(), strict=True)
        ]
        return with_gradients(outputs, leaves, grads)

    def _all(self) -> list[torch.Tensor]:
        return [*self.inputs.values(), *self.upstream]


@dataclass(slots=True, kw_only=True)
class Runner:
    """A peer's function on the shared tensors."""

    function: Function
    tensors: Tensors
    _outputs: list[torch.Tensor] = field(default_factory=list)

    def variants(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """What is timed by name: the call, and what runs untimed before it."""
        restore = self.tensors.restore
        if self.tensors.case.changes:
            return {"total": (self.forward, restore)}
        return {
            "forward": (self.forward, restore),
            "backward": (self._backward, self._before_backward),
            "total": (self.total, restore),
        }

    def forward(self) -> Any:
        """The op, on the autograd tape."""
        return self.function(**self.tensors.inputs)

    def total(self) -> object:
        """Forward and backward, or the step of an op that changes its inputs."""
        if self.tensors.case.changes:
            return self.forward()
        return self._gradients(list(named_outputs(self.forward()).values()))

    def _before_backward(self) -> None:
        self.tensors.restore()
        self._outputs = list(named_outputs(self.forward()).values())

    def _backward(self) -> object:
        outputs, self._outputs = self._outputs, []
        return self._gradients(outputs)

    def _gradients(self, outputs: list[torch.Tensor]) -> object:
        leaves = [t for t in self.tensors.inputs.values() if t.requires_grad]
        return torch.autograd.grad(outputs, leaves, self.tensors.upstream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes above inputs and upstream gradients."""

    saved_bytes: int
    """Held between forward and backward, outputs not counted."""
    peak_bytes: int
    """Most at any time, less the gradients that are returned."""


def measure_memory(runner: Runner, device: torch.device) -> Memory:
    """Run forward and backward once, warm, and look at the allocator. CUDA only."""
    runner.tensors.restore()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    if runner.tensors.case.changes:
        runner.forward()
        return Memory(saved_bytes=0, peak_bytes=torch.cuda.max_memory_allocated(device) - before)
    outputs = list(named_outputs(runner.forward()).values())
    held = torch.cuda.memory_allocated(device) - before
    own = sum(storage_bytes(outputs).values())
    inputs = storage_bytes(list(runner.tensors.inputs.values()))
    own -= sum(size for pointer, size in storage_bytes(outputs).items() if pointer in inputs)
    leaves = [t for t in runner.tensors.inputs.values() if t.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, runner.tensors.upstream)
    peak = torch.cuda.max_memory_allocated(device) - before
    made = sum(storage_bytes(list(grads)).values())
    return Memory(saved_bytes=held - own, peak_bytes=peak - made)


def storage_bytes(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes of the memory behind tensors by its address: views of one count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cast(tensor.detach(), dtype) if tensor.is_floating_point() else tensor
