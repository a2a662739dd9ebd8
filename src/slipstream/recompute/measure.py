"""Runs a model once, layer by layer and keeping nothing, and measures a layer of each kind.

Layers are cut apart: what goes into one is a leaf, so no activation outlives its layer and the
model need not fit with all of them. Costs are kept on disk by device, versions and shapes.
"""

import gc
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from slipstream.nn.saved import Scope
from slipstream.nn.site import OFFLOAD
from slipstream.recompute import store
from slipstream.recompute.cost import Cost, LayerCosts, Link, ModelCosts
from slipstream.recompute.link import host_bytes, measure_link
from slipstream.recompute.meter import Meter, differentiable, kept_bytes, size_of, trained
from slipstream.recompute.sites import Unit, acting, describe, keeping

WARMUP, REPEATS = 1, 12
Run = Callable[[], torch.Tensor]
"""A forward pass of the whole model; returns what backward starts from."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """What one run of the model shows."""

    inputs: dict[str, tuple[tuple, dict]] = field(default_factory=dict)
    """Arguments of the last layer of each kind."""
    leaves: list[torch.Tensor] = field(default_factory=list)
    """Outputs of the last layer, which the tail starts from."""
    start: int = 0
    """Bytes in use there."""
    peak: list[int] = field(default_factory=list)
    """Most bytes above that in the forward pass of the tail."""
    begin: Any = None
    """The moment."""


def measure(model: nn.Module, units: Sequence[Unit], run: Run, meter: Meter) -> ModelCosts:
    """Costs of every kind of layer and of the rest of the model."""
    static = _static_bytes(model, meter)
    with unchanged(model), acting(model, keeping(units)), uncompiled(model, units):
        if meter.on_gpu:  # the first time compiles kernels
            _run(model, units, run, meter)
        seen, tail = _run(model, units, run, meter)
        layers = {
            unit.kind: _layer(model, unit, seen.inputs[unit.kind], meter)
            for unit in {u.kind: u for u in reversed(units)}.values()
        }
        link = _link(model, units, seen, meter)
    inside = {id(p) for unit in units for p in trained(model.get_submodule(unit.name))}
    outside = sum(_grad_size(p) for p in trained(model) if id(p) not in inside)
    return ModelCosts(
        layers=layers,
        tail=tail,
        rest_grad_bytes=max(0, outside - tail.grad_bytes),
        static_bytes=static,
        has_grads=any(p.grad is not None for p in model.parameters()),
        link=link,
        host_bytes=host_bytes(),
    )


def probe(model: nn.Module, run: Run, meter: Meter) -> int:
    """Measured peak of one forward and backward pass, gradients in memory of their own."""
    with unchanged(model):
        gc.collect()
        before = meter.allocated()
        with meter.peak() as found:
            torch.autograd.grad(run(), trained(model), allow_unused=True)
    return before + found[0]


@contextmanager
def unchanged(model: nn.Module) -> Generator[None]:
    """Buffers and random states are afterwards what they were."""
    before = [(b, b.clone()) for b in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


def _layer(model: nn.Module, unit: Unit, inputs: tuple[tuple, dict], meter: Meter) -> LayerCosts:
    key = store.key(meter.device, unit.kind, describe(inputs))
    known = store.read(key, LayerCosts)
    if known is not None:
        return known
    module = model.get_submodule(unit.name)
    acts = [
        (site, action) for site in unit.sites for action in site.actions[1:] if action != OFFLOAD
    ]
    variants = [{}, *({site.name: action} for site, action in acts)]
    memory = []
    for variant in variants:
        with acting(model, variant):
            memory.append(meter.memory(module, *inputs))
    # In turns: a device that grows warm and slow does so for all of them.
    times: list[list[tuple[float, float]]] = [[] for _ in variants]
    for _ in range(WARMUP + REPEATS):
        for variant, found in zip(variants, times, strict=True):
            with acting(model, variant):
                found.append(meter.passes(module, *inputs))
    keep, *others = [
        _timed(cost, found[WARMUP:]) for cost, found in zip(memory, times, strict=True)
    ]
    costs = LayerCosts(
        # To give something up takes time: all the rest is noise, which cheap actions are lost in.
        keep=replace(keep, ms=min(cost.ms for cost in (keep, *others))),
        actions={(site.part, a): cost for (site, a), cost in zip(acts, others, strict=True)},
    )
    store.write(key, costs)
    return costs


def _timed(cost: Cost, times: Sequence[tuple[float, float]]) -> Cost:
    forward = statistics.median(forward for forward, _ in times)
    return replace(cost, ms=statistics.median(map(sum, times)), forward_ms=forward)


def _link(model: nn.Module, units: Sequence[Unit], seen: Pass, meter: Meter) -> Link | None:
    movers = [u for u in units if any(OFFLOAD in site.actions for site in u.sites)]
    if not movers:
        return None
    inputs = seen.inputs[movers[-1].kind]
    key = store.key(meter.device, f"link-{movers[-1].kind}", describe(inputs))
    link = store.read(key, Link)
    if link is None:
        module = model.get_submodule(movers[-1].name)
        link = measure_link(meter, lambda: meter.run(module, *inputs))
        store.write(key, link)
    return link


def _run(model: nn.Module, units: Sequence[Unit], run: Run, meter: Meter) -> tuple[Pass, Cost]:
    """The inputs of a layer of each kind, and the cost of the tail."""
    seen, nothing, tail = Pass(), ExitStack(), ExitStack()
    scope = Scope()

    def before(kind: str, args: tuple, kwargs: dict) -> None:
        # The last of its kind stays: the first may lack what comes from layers before it.
        seen.inputs[kind] = tree_map(_leaf, (args, kwargs))

    def after(name: str, output: Any) -> Any:
        output = tree_map(_leaf, output)
        if name == units[-1].name:
            nothing.close()
            seen.leaves, seen.start = differentiable(output), meter.allocated()
            seen.peak, seen.begin = tail.enter_context(meter.peak()), meter.mark()
            tail.enter_context(scope)
        return output

    with tail, nothing:
        for unit in units:
            tail.enter_context(_watched(model.get_submodule(unit.name), unit, before, after))
        nothing.enter_context(saved_tensors_hooks(lambda _: None, _gone))
        value = run()
        middle = meter.mark()
    kept = kept_bytes(scope, model.parameters())
    scope.boxes.clear()
    between = meter.allocated() - seen.start
    again = meter.mark()
    with meter.peak() as backward:
        grads = torch.autograd.grad(value, [*seen.leaves, *trained(model)], allow_unused=True)
    forward_ms, backward_ms = meter.between(seen.begin, middle), meter.between(again, meter.mark())
    sizes = [size_of(grad) for grad in grads[len(seen.leaves) :] if grad is not None]
    return seen, Cost(
        kept_bytes=kept,
        ms=forward_ms + backward_ms,
        forward_ms=forward_ms,
        forward_bytes=max(kept, seen.peak[0]),
        backward_bytes=max(kept + sum(sizes), between + backward[0]),
        grad_bytes=sum(sizes),
        largest_grad_bytes=max(sizes, default=0),
    )


@contextmanager
def _watched(
    module: nn.Module,
    unit: Unit,
    before: Callable[[str, tuple, dict], None],
    after: Callable[[str, Any], Any],
) -> Generator[None]:
    hooks = (
        module.register_forward_pre_hook(
            lambda _, args, kwargs: before(unit.kind, args, kwargs), with_kwargs=True
        ),
        module.register_forward_hook(lambda _, __, output: after(unit.name, output)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _static_bytes(model: nn.Module, meter: Meter) -> int:
    if meter.on_gpu:
        return meter.allocated()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(size_of(t) for t in (*model.parameters(), *model.buffers(), *grads))


def _grad_size(param: torch.Tensor) -> int:
    # Gradients that are added up may be wider than the weights.
    dtype = param.dtype if param.grad_dtype is None else param.grad_dtype
    return param.numel() * dtype.itemsize


@contextmanager
def uncompiled(model: nn.Module, units: Sequence[Unit]) -> Generator[None]:
    """Layers run as they are within the block: compiling every action would take minutes."""
    modules = [model, *(model.get_submodule(unit.name) for unit in units)]
    compiled = [module._compiled_call_impl for module in modules]
    for module in modules:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(modules, compiled, strict=True):
            module._compiled_call_impl = call


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _gone(_: Any) -> torch.Tensor:
    raise AssertionError("a tensor was let go of that backward needs")
