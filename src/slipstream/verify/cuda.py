"""The checks that need a GPU: no host synchronisation, and capture in a CUDA graph."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from slipstream.hw.capture import captured
from slipstream.ops import ahead
from slipstream.verify.budget import (
    Figure,
    Results,
    make_leaves,
    named_outputs,
    upstream,
    with_gradients,
)
from slipstream.verify.checks import Data, Outcome, Subject, differences, judge

WARM_UPS = 3


def check_sync(subject: Subject, data: Data) -> Outcome:
    """Forward and backward never wait for the device: PyTorch raises where one does."""

    def run() -> tuple[list[str], list[Figure]]:
        leaves = make_leaves(data.draws[0], None, data.case.wanted)
        step = _step(data, leaves)
        step()
        with _raising_on_synchronisation():
            step()
        return [], []

    return judge(subject, data.case.name, "sync", run)


def check_graph(subject: Subject, data: Data) -> Outcome:
    """A captured graph replays to the same bits, also with other inputs in the same memory."""

    def run() -> tuple[list[str], list[Figure]]:
        leaves = make_leaves(data.draws[0], None, data.case.wanted)
        # Copies: nothing of the graph may share memory with the inputs of the plain runs.
        leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in leaves.items()}
        step = _step(data, leaves)
        stream = torch.cuda.Stream(data.device)
        _warm_up(step, stream)
        ahead.settle()
        graph, replayed = captured(step, stream)
        problems = []
        for seed, inputs in ((0, data.draws[0]), (1, data.draw(1))):
            with torch.no_grad():
                for name, leaf in leaves.items():
                    leaf.copy_(inputs[name])
            graph.replay()
            torch.cuda.synchronize(data.device)
            expected = data.run(data.case.call, inputs)
            problems += differences(replayed, expected, f"replay with seed {seed} differs")
        return problems, []

    return judge(subject, data.case.name, "graph", run)


def _step(data: Data, leaves: Results) -> Callable[[], Results]:
    # The upstream gradients are made on the host, so before anything is watched or captured.
    grads = upstream(named_outputs(data.case.call(**leaves)), data.dtype)
    return lambda: with_gradients(named_outputs(data.case.call(**leaves)), leaves, grads)


def _warm_up(step: Callable[[], Results], stream: torch.cuda.Stream) -> None:
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    current.wait_stream(stream)


@contextmanager
def _raising_on_synchronisation() -> Generator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
