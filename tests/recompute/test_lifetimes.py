"""Nothing made in a step outlives it, with Python's cycle collector off, whatever layers keep."""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slipstream
from slipstream.nn import MLP, Attention, MoE
from slipstream.nn.offload import Offload, around
from slipstream.nn.saved import Scope, _Again, recomputed
from slipstream.recompute.sites import find_units
from tests.recompute.models import VOCAB, build, objective

LAYER = ("keep", "offload:2:1")


class Made(TorchDispatchMode):
    """Storages that operations within the block return."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.storages.append((StorageWeakRef(leaf.untyped_storage()), str(func)))
        return result

    def alive(self, known: set[int]) -> list[str]:
        """Operations whose results are still there, but for those of ``known`` storages."""
        return sorted({
            name for ref, name in self.storages if not ref.expired() and ref.cdata not in known
        })  # fmt: skip


@contextmanager
def uncollected() -> Generator[None]:
    """Cycles stay within the block; a collection in it looks at what is new only."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def known(model: nn.Module) -> set[int]:
    """Storages that belong to a model, its gradients and whatever it remembers between steps."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for module in model.modules():
        values = (leaf for leaf in tree_leaves(list(vars(module).values())))
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def cycles() -> list[str]:
    """Types of what only the cycle collector would free, of ours and of tensors."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [type(item) for item in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    ours = [t for t in found if t.__module__.startswith("slipstream") or t is torch.Tensor]
    return sorted({kind.__qualname__ for kind in ours})


def left_behind(model: nn.Module, step: Callable[[], object]) -> tuple[list[str], list[str]]:
    """What of a step is still there, and what of it was in cycles."""
    step()  # what stays is made the first time
    with uncollected():
        with Made() as made:
            step()
        return made.alive(known(model)), cycles()


def combinations() -> Iterator[tuple[str, dict[type[nn.Module], str]]]:
    for attention, moe, shared in product(
        Attention.recompute_actions, MoE.recompute_actions, MLP.recompute_actions
    ):
        # The shared expert is nobody's neighbour but the experts'.
        if shared == "keep" or attention == "keep":
            chosen = {Attention: attention, MoE: moe, MLP: shared}
            yield f"{attention}-{moe}-{shared}", chosen


CASES = dict(combinations())


def trainer(actions: dict[type[nn.Module], str], layer: str) -> nn.Module:
    model = build("moe", num_layers=3)
    for module in model.modules():
        if type(module) in actions:
            module.recompute = actions[type(module)]
    for each in model.layers[:2]:
        each.recompute = layer
    return model


@pytest.mark.parametrize("layer", LAYER)
@pytest.mark.parametrize("case", CASES)
def test_a_step_leaves_nothing(case: str, layer: str) -> None:
    model = trainer(CASES[case], layer)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        objective(model).backward()

    assert left_behind(model, step) == ([], [])


@pytest.mark.parametrize("layer", LAYER)
@pytest.mark.parametrize("case", ["keep-keep-keep", "full-full-keep", "keep-norm-recompute"])
def test_a_forward_pass_without_backward_leaves_nothing(case: str, layer: str) -> None:
    model = trainer(CASES[case], layer)
    assert left_behind(model, lambda: objective(model)) == ([], [])


@pytest.mark.parametrize("layer", LAYER)
@pytest.mark.parametrize("case", ["rope-experts-keep", "full-full-keep"])
def test_gradients_of_some_inputs_leave_nothing(case: str, layer: str) -> None:
    model = trainer(CASES[case], layer)
    # Nothing is asked of layer 0, and of layer 1 one weight.
    wanted = [*model.layers[2].parameters(), model.layers[1].attention.wo.weight]

    def step() -> None:
        torch.autograd.grad(objective(model), wanted, allow_unused=True)

    assert left_behind(model, step) == ([], [])


def optimized() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
    )
    model = transformers.Qwen3MoeForCausalLM(config).train()
    slipstream.optimize(model)
    return model


def hugging_face_actions() -> list[tuple[str, str]]:
    return list(product(Attention.recompute_actions, MoE.recompute_actions))


@pytest.mark.parametrize("layer", LAYER)
def test_a_step_of_an_optimized_model_leaves_nothing(layer: str) -> None:
    model = optimized()
    ids = torch.randint(VOCAB, (2, 16))
    units = find_units(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    parts = {site.part for site in units[0].sites}
    assert parts == {"", "self_attn", "mlp"}
    found = {}
    for attention, moe in hugging_face_actions():
        wanted = {"": "keep", "self_attn": attention, "mlp": moe}
        for unit in units:
            for site in unit.sites:
                action = layer if not site.part and unit is not units[-1] else wanted[site.part]
                model.get_submodule(site.name).recompute = action
        found[attention, moe] = left_behind(model, step)
    assert found == dict.fromkeys(hugging_face_actions(), ([], []))


@pytest.mark.parametrize("kind", ["plain", "recompute", "offload"])
def test_an_error_inside_leaves_nothing(kind: str) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * x.cos()
        raise KeyError(str(y.shape))

    def run() -> None:
        x = torch.ones(8, 8, requires_grad=True)
        try:
            if kind == "recompute":
                recomputed(lambda x: (x.exp(),), fail, x)
            elif kind == "offload":
                around(nn.Identity(), "offload", lambda: fail(x))
            else:
                with Scope():
                    fail(x)
        except KeyError:
            return
        raise AssertionError("it went well")

    assert left_behind(nn.Identity(), run) == ([], [])


def test_what_backward_does_not_read_goes_with_the_graph() -> None:
    made: list[_Again] = []
    plain = _Again.__init__

    def step() -> None:
        x = torch.ones(8, 8, requires_grad=True)
        w = torch.ones(8, 8, requires_grad=True)
        with Offload(nn.Identity()):
            y = recomputed(lambda x: (x.sin(), x.cos()), lambda s, c: (s @ w) * (c @ w), x)
        # The gradient of w alone reads both, that of x neither sine nor cosine.
        torch.autograd.grad(y.sum(), x)

    def noted(again: _Again, *args: Any) -> None:
        made.append(again)
        plain(again, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Again, "__init__", noted)
        step()
    (again,) = made
    assert all(not value.requires_grad for value in again._values.values())
    made.clear()
    del again
    assert left_behind(nn.Identity(), step) == ([], [])


def test_recomputed_values_are_gone_before_backward_ends() -> None:
    made: list[_Again] = []
    plain = _Again.__init__

    def noted(again: _Again, *args: Any) -> None:
        made.append(again)
        plain(again, *args)

    model = trainer({Attention: "full", MoE: "full", MLP: "recompute"}, "offload:1:1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Again, "__init__", noted)
        objective(model).backward()
    assert len(made) >= 3 * 2
    assert [list(again._values) for again in made] == [[]] * len(made)


def test_backward_frees_what_it_has_read():
    """Node by node, not when the last one of the scope is through."""
    x, freed = torch.randn(8, requires_grad=True), []
    with Scope():
        first = x * torch.randn(8)
        kept = torch.randn(8)
        memory = StorageWeakRef(kept.untyped_storage())
        second = first * kept
        del kept
    assert not memory.expired()
    first.register_hook(lambda _: freed.append(memory.expired()))
    second.sum().backward()
    assert freed == [True]
