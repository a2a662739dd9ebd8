"""Forward and backward of a micro-batch as CUDA graphs: recorded once, replayed in every step.

An eager pass costs the host a launch per kernel, a replay costs it one for all of them. The first
graph of a step writes the gradients, a second one adds to them for the micro-batches after it.
Inputs, results and gradients lie at fixed addresses. The optimizer and evaluation stay eager.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.errors import ConfigError, TrainingError
from slipstream.hw.capture import captured
from slipstream.parallel import Ranks
from slipstream.train.config import RunConfig

WARM_UP = 3
"""Passes before recording: kernels compile and libraries allocate what a graph must not."""

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records work on a device, to be repeated on the same memory."""

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run ``function`` a few times."""
        ...

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Record ``function``; its result, which a replay fills, and what replays it."""
        ...


class CudaRecorder:
    """Records into CUDA graphs that share their memory and so are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the stream it will be recorded on."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Record ``function`` without running it."""
        # Other threads pin batches and copy checkpoints meanwhile; that is no part of it.
        graph, output = captured(function, self._stream, pool=self._pool, error_mode="thread_local")
        return output, graph.replay

    def idle_bytes(self) -> int:
        """Memory the graphs keep that no tensor holds between replays."""
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )


class GraphedPasses:
    """``passes``, forward and backward of a micro-batch, recorded when it first runs.

    ``passes`` takes the tensors given to ``load`` and returns one of results; shapes never change.
    ``accumulate``: there are micro-batches after the first, whose gradients are added. Recording
    leaves gradients, buffers of ``module`` and random states as they were.
    """

    def __init__(
        self,
        module: nn.Module,
        passes: Callable[..., torch.Tensor],
        recorder: Recorder,
        *,
        accumulate: bool,
    ) -> None:
        self._module, self._passes, self._recorder = module, passes, recorder
        self._accumulate = accumulate
        self._params = [param for param in module.parameters() if param.requires_grad]
        self._device = self._params[0].device
        self._inputs: list[torch.Tensor | None] = []
        self._recorded: list[tuple[torch.Tensor, Replay]] = []
        self._grads: list[tuple[nn.Parameter, torch.Tensor]] = []

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Where the graphs write gradients; none before the first run."""
        return [grad for _, grad in self._grads]

    def load(self, inputs: Sequence[torch.Tensor | None]) -> None:
        """Copy the inputs of the next micro-batch to where the graphs read them."""
        if not self._inputs:
            self._inputs = [
                None if given is None else torch.empty_like(given, device=self._device)
                for given in inputs
            ]
        for mine, given in zip(self._inputs, inputs, strict=True):
            if mine is not None and given is not None:
                assert mine.shape == given.shape, (mine.shape, given.shape)
                mine.copy_(given, non_blocking=True)

    def run(self, *, first: bool) -> torch.Tensor:
        """Results of the loaded micro-batch, valid until the next run; gradients are in ``grad``.

        The ``first`` micro-batch of a step overwrites gradients, whatever they were. Raises
        TrainingError where recording fails.
        """
        if not self._recorded:
            self._record()
        output, replay = self._recorded[0 if first else 1]
        replay()
        # The optimizer drops gradients after a step; these are where the graphs write.
        for param, grad in self._grads:
            if param.grad is not grad:
                param.grad = grad
        return output

    def _record(self) -> None:
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._drop_grads()
            self._recorder.warm_up(self._warm_pass)
            self._drop_grads()
            self._recorded.append(self._capture())
            self._grads = [(p, p.grad) for p in self._params if p.grad is not None]
            if self._accumulate:
                self._recorded.append(self._capture())
                assert all(param.grad is grad for param, grad in self._grads)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _capture(self) -> tuple[torch.Tensor, Replay]:
        try:
            return self._recorder.record(self._pass)
        except RuntimeError as error:
            raise TrainingError(
                f"forward and backward cannot be recorded as a CUDA graph: {_cause(error)}; set "
                "train.cuda_graph=false"
            ) from error

    def _pass(self) -> torch.Tensor:
        return self._passes(*self._inputs)

    def _warm_pass(self) -> None:
        # Sums of gradients take memory of their own, which a lone micro-batch has no use for.
        if not self._accumulate:
            self._drop_grads()
        self._pass()

    def _drop_grads(self) -> None:
        for param in self._params:
            param.grad = None


def recorder_for(config: RunConfig, ranks: Ranks) -> Recorder | None:
    """What records the passes of a run; None unless ``train.cuda_graph``."""
    return CudaRecorder(ranks.device) if config.train.cuda_graph else None


def check_graph(config: RunConfig, ranks: Ranks) -> None:
    """ConfigError for ``train.cuda_graph`` where there can be none."""
    if not config.train.cuda_graph:
        return
    if ranks.device.type != "cuda":
        raise ConfigError(
            f"train.cuda_graph = true needs a CUDA device, this run is on {ranks.device.type} "
            f"(train.device = {config.train.device}); set train.cuda_graph=false"
        )
    if ranks.world > 1:
        raise ConfigError(
            f"train.cuda_graph = true is for one rank, this run has {ranks.world}, whose gradients "
            "are reduced during backward; set train.cuda_graph=false, or start one process"
        )


def check_sites(config: RunConfig, model: nn.Module) -> None:
    """ConfigError where ``train.cuda_graph`` meets activations that wait on the host."""
    actions = ((n, getattr(m, "recompute", "")) for n, m in model.named_modules())
    names = [name for name, action in actions if str(action).startswith("offload")]
    if config.train.cuda_graph and names:
        raise ConfigError(
            f"train.cuda_graph = true cannot record the offload that recompute.mode = "
            f"{config.recompute.mode} chose for {names[0]} and {len(names) - 1} more; raise "
            "recompute.budget_gib, or set train.cuda_graph=false"
        )


def _cause(error: BaseException) -> str:
    # Ending a broken recording raises once more; what broke it comes first.
    seen: Any = error
    while seen.__context__ is not None:
        seen = seen.__context__
    lines = str(seen).strip().splitlines()
    return f"{type(seen).__name__}: {lines[0] if lines else ''}"
