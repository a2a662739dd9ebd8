"""Every action of every site: gradients to the bit, less kept, routing computed once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.nn import MLP, Attention, MoE
from slipstream.ops import dispatch
from tests.recompute.models import act, after_two_passes, build, kept, objective

SITES = {"Attention": Attention, "MLP": MLP, "MoE": MoE}
ACTIONS = [
    *((kind, action) for kind, site in SITES.items() for action in site.recompute_actions[1:]),
    ("Layer", "offload"),
]
CASES = [
    (shape, kind, action)
    for shape in ("dense", "moe", "biased")
    for kind, action in ACTIONS
    if shape == "moe" or kind != "MoE"
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "kind", "action"), CASES)
def test_gradients_are_equal_to_the_bit(
    shape: str, kind: str, action: str, dtype: torch.dtype
) -> None:
    plain, other = build(shape, dtype=dtype), build(shape, dtype=dtype)
    act(other, kind, action)
    wanted, found = after_two_passes(plain), after_two_passes(other)
    assert wanted.keys() == found.keys()
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    assert different == []


def test_all_at_once_with_offload_around_them() -> None:
    plain, other = build("moe"), build("moe")
    for kind, site in SITES.items():
        act(other, kind, site.recompute_actions[-1])
    act(other, "Layer", "offload")
    wanted, found = after_two_passes(plain), after_two_passes(other)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert kept(other) < 0.1 * kept(plain)
    assert found["layers.0.moe.rerouted"] > 0


@pytest.mark.parametrize(
    ("shape", "kind", "actions"),
    [
        ("dense", "Attention", ("keep", "rope", "recompute", "full")),
        ("dense", "MLP", ("keep", "reemit", "recompute")),
        ("moe", "MoE", ("keep", "norm", "full")),
        ("moe", "MoE", ("keep", "experts", "full")),
        ("moe", "Layer", ("keep", "offload")),
    ],
)
def test_each_keeps_less_than_the_one_before(
    shape: str, kind: str, actions: tuple[str, ...]
) -> None:
    model, found = build(shape), []
    for action in actions:
        act(model, kind, action)
        found.append(kept(model))
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


def test_routing_runs_once_and_the_norm_twice() -> None:
    def calls(action: str) -> dict[str, int]:
        model = build("moe", num_layers=1)
        act(model, "MoE", action)
        dispatch.reset_counts()
        objective(model).backward()
        found: dict[str, int] = {}
        for (op, _), count in dispatch.counts().items():
            found[op] = found.get(op, 0) + count
        return found

    plain, again = calls("keep"), calls("full")
    assert again["moe_route"] == plain["moe_route"] == 1
    assert again["moe_router"] == plain["moe_router"] == 1
    # One more for the router, the experts and the shared expert together.
    assert again["norm"] == plain["norm"] + 1


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_any_mixture_routes_once_and_is_equal(data: st.DataObject) -> None:
    plain, other = build("moe"), build("moe")
    for name, module in other.named_modules():
        if hasattr(module, "recompute_actions"):
            module.recompute = data.draw(st.sampled_from(module.recompute_actions), label=name)
    wanted = after_two_passes(plain)
    dispatch.reset_counts()
    found = after_two_passes(other)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    # Two layers, two passes.
    routed = [n for (op, _), n in dispatch.counts().items() if op == "moe_route"]
    assert routed == [4]


def test_two_backward_passes_of_one_forward() -> None:
    model = build("moe")
    for kind, site in SITES.items():
        act(model, kind, site.recompute_actions[-1])
    params = list(model.parameters())
    loss = objective(model)
    first = torch.autograd.grad(loss, params, retain_graph=True)
    second = torch.autograd.grad(loss, params)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("shape", "actions"), [("dense", 2), ("moe", -1)])
def test_compiled_layers_recompute_too(shape: str, actions: int) -> None:
    def compiled(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        return model

    torch._dynamo.reset()
    plain, other = compiled(build(shape)), compiled(build(shape))
    for kind, site in SITES.items():
        act(other, kind, site.recompute_actions[actions])
    act(other, "Layer", "offload")
    wanted, found = after_two_passes(plain), after_two_passes(other)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    act(other, "Layer", "keep")
    assert kept(other) < kept(plain)
    torch._dynamo.reset()


def test_evaluation_keeps_nothing_and_says_the_same() -> None:
    plain, other = build("moe").eval(), build("moe").eval()
    for kind, site in SITES.items():
        act(other, kind, site.recompute_actions[-1])
    with torch.no_grad():
        assert torch.equal(objective(plain), objective(other))
