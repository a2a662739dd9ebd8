"""Plans: from costs to actions, on the device and with invented numbers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import recompute
from slipstream.errors import ConfigError
from slipstream.recompute.choose import least
from slipstream.recompute.cost import LayerCosts, Link
from slipstream.recompute.measure import measure
from slipstream.recompute.meter import Meter
from slipstream.recompute.sites import find_units
from tests.recompute.costs import GIB, Invented, cost, model_costs
from tests.recompute.models import after_two_passes, build, kept, sample


def invented(
    model: nn.Module, off_by: int | Callable[[Mapping[str, str]], int] | None = None
) -> Invented:
    """Shapes of an MoE layer: much memory cheap to give up, some dear, static memory 10 GiB."""
    (kind,) = {unit.kind for unit in find_units(model)}
    keep = (4 * GIB, 20.0)

    def less(gib: float, ms: float):
        kept = keep[0] - int(gib * GIB)
        return cost(kept, keep[1] + ms, forward_ms=7.0, stays=GIB // 8, grain=GIB // 80)

    layer = LayerCosts(
        keep=less(0.0, 0.0),
        actions={
            ("attention", "reemit"): less(0.25, 0.02),
            ("attention", "rope"): less(0.75, 0.1),
            ("attention", "recompute"): less(1.0, 1.0),
            ("attention", "full"): less(1.25, 3.0),
            ("moe", "norm"): less(0.25, 0.03),
            ("moe", "experts"): less(2.0, 4.0),
            ("moe", "full"): less(2.25, 4.05),
            ("moe.shared", "reemit"): less(0.1, 0.01),
            ("moe.shared", "recompute"): less(0.3, 0.5),
        },
    )
    # So slow a link that only what is left when all is made again is hidden.
    costs = model_costs({kind: layer}, static=10 * GIB, bytes_per_ms=GIB / 80)
    return Invented(costs, find_units(model), off_by)


def test_cheap_memory_goes_first_and_dear_memory_stays() -> None:
    model = build("moe", num_layers=4)
    plan = recompute.plan(model, sample(), 22.0, costs=invented(model))
    assert plan.unconstrained_gib == 26.0
    assert plan.predicted_gib is not None
    assert 21.0 < plan.predicted_gib <= 22.0
    assert set(plan.actions) == {site.name for unit in find_units(model) for site in unit.sites}
    attention = [plan.actions[f"layers.{i}.attention"] for i in range(4)]
    experts = [plan.actions[f"layers.{i}.moe"] for i in range(4)]
    assert attention == ["rope"] * 4
    assert experts == ["norm"] * 4
    assert plan.ms_paid == pytest.approx(sum(row.ms_paid for row in plan.rows))
    saved = sum(row.gib_saved for row in plan.rows)
    assert plan.predicted_gib == pytest.approx(plan.unconstrained_gib - saved)


def test_nothing_is_given_up_where_all_fits() -> None:
    model = build("moe")
    plan = recompute.plan(model, sample(), 100.0, costs=invented(model))
    assert set(plan.actions.values()) == {"keep"}
    assert plan.rows == ()
    assert plan.ms_paid == 0


def test_a_budget_too_small_names_the_least() -> None:
    model = build("moe", num_layers=3)
    with pytest.raises(
        ConfigError, match=r"recompute\.budget_gib = 3, .* with is (\d+\.\d+)"
    ) as no:
        recompute.plan(model, sample(), 3.0, costs=invented(model))
    least = float(str(no.value).split(" with is ")[1].split(";")[0])
    plan = recompute.plan(model, sample(), least, costs=invented(model))
    assert plan.predicted_gib is not None
    assert plan.minimum_gib == plan.predicted_gib <= least
    assert any(action.startswith("offload:") for action in plan.actions.values())


def test_every_budget_is_nested_in_the_next() -> None:
    model = build("moe", num_layers=3)
    budgets = [22.0, 20.0, 19.0, 18.0, 16.5, 15.0, 14.0]
    plans = [recompute.plan(model, sample(), b, costs=invented(model)) for b in budgets]
    found = [plan.predicted_gib for plan in plans]
    assert found == sorted(found, reverse=True)
    assert all(p <= b for p, b in zip(found, budgets, strict=True))
    spent = [plan.ms_paid for plan in plans]
    assert spent == sorted(spent)


@pytest.mark.parametrize("off_gib", [-1.0, 0.0, 1.0])
def test_measured_peaks_correct_the_plan(off_gib: float) -> None:
    model = build("moe", num_layers=4)
    source = invented(model, off_by=int(off_gib * GIB))
    plan = recompute.plan(model, sample(), 22.0, costs=source)
    assert plan.predicted_gib is not None
    assert plan.unconstrained_gib == 26.0 + off_gib
    # The plan was the last one tried, and is within the budget but no more than a step.
    assert source.tried[-1] == plan.actions
    assert 20.0 < plan.predicted_gib <= 22.0
    # The first had every step but offload.
    assert {source.tried[0][f"layers.{i}.moe"] for i in range(4)} == {"full"}
    assert not any(action.startswith("offload") for action in source.tried[0].values())


def test_more_is_given_up_until_the_measured_peak_fits() -> None:
    model = build("moe", num_layers=4)
    # Off by less, the more is given up.
    source = invented(model, off_by=lambda actions: GIB * list(actions.values()).count("keep") // 8)
    budgets = [24.0, 23.0, 22.0, 21.0, 20.0]
    plans = [recompute.plan(model, sample(), budget, costs=source) for budget in budgets]
    for plan, budget in zip(plans, budgets, strict=True):
        assert plan.predicted_gib is not None
        assert plan.predicted_gib <= budget
    spent = [plan.ms_paid for plan in plans]
    assert spent == sorted(spent)


def test_gradients_of_earlier_micro_batches_count() -> None:
    model = build("dense")
    (kind,) = {unit.kind for unit in find_units(model)}
    layer = LayerCosts(keep=cost(100, 1.0, 10, 40), actions={})
    source = Invented(model_costs({kind: layer}, static=1000), find_units(model))
    one = recompute.plan(model, sample(), 1.0, costs=source)
    several = recompute.plan(model, sample(), 1.0, costs=source, accumulate=True)
    assert one.unconstrained_gib == (1000 + 200 + 10 + 40) / GIB
    assert several.unconstrained_gib == (1000 + 80 + 200 + 10 + 40) / GIB


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_measured_bytes_are_those_a_step_keeps(shape: str) -> None:
    model = build(shape, num_layers=3)
    meter, units = Meter(torch.device("cpu")), find_units(model)

    def run() -> torch.Tensor:
        output = model(*sample())
        return output.loss[0] + output.router_loss

    costs = measure(model, units, run, meter)
    assert len(costs.layers) == 1
    layers = sum(costs.layers[unit.kind].keep.kept_bytes for unit in units)
    # Layers of a whole model keep what each keeps alone; the embedding keeps the tokens.
    whole = kept(model)
    assert layers + costs.tail.kept_bytes == pytest.approx(whole, rel=0.02)
    assert costs.static_bytes == sum(
        t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())
    )


def test_noise_makes_keeping_everything_no_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("moe")
    (unit, *_), meter = find_units(model), Meter(torch.device("cpu"))
    variants = 1 + sum(len(site.actions) - 1 for site in unit.sites if site.part)
    calls = count()
    # The first variant keeps everything, and each is a little faster than the one before it.
    monkeypatch.setattr(
        Meter, "passes", lambda *_: (1.0, 9.0 - (next(calls) % variants) / variants)
    )
    costs = measure(model, find_units(model), lambda: model(*sample()).loss[0], meter)
    (layer,) = costs.layers.values()
    assert len(layer.actions) == variants - 1
    assert layer.keep.ms == min(cost.ms for cost in layer.actions.values()) == 9.0 + 1 / variants
    assert min(layer.paid_ms(cost) for cost in layer.actions.values()) == 0


def test_planning_leaves_the_model_as_it_was() -> None:
    model, untouched = build("moe"), build("moe")
    before = torch.get_rng_state()
    plan = recompute.plan(model, sample(), 1.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert plan.unconstrained_gib is not None
    wanted, found = after_two_passes(untouched), after_two_passes(model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


def test_a_measured_plan_keeps_gradients_and_saves_memory() -> None:
    plain, model = build("moe", num_layers=3), build("moe", num_layers=3)
    # So many tokens that activations outweigh gradients.
    free = recompute.plan(model, sample(batch=32), 1.0)
    assert free.minimum_gib is not None
    assert free.unconstrained_gib is not None
    budget = (free.minimum_gib + free.unconstrained_gib) / 2
    plan = recompute.plan(model, sample(batch=32), budget)
    recompute.apply(model, plan)
    assert plan.predicted_gib is not None
    assert plan.predicted_gib <= budget
    assert kept(model) < kept(plain)
    wanted, found = after_two_passes(plain), after_two_passes(model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_costs_are_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("dense")
    first = recompute.plan(model, sample(), 1.0)
    (file,) = [f for f in cache.glob("*.json") if "keep" in json.loads(f.read_text())]
    assert len(list(cache.glob("*.json"))) == 2  # and the link
    for name in ("memory", "passes"):
        monkeypatch.setattr(Meter, name, None)  # not called
    assert recompute.plan(build("dense"), sample(), 1.0) == first
    values = json.loads(file.read_text())
    values["keep"]["kept_bytes"] *= 2
    file.write_text(json.dumps(values))
    assert recompute.plan(build("dense"), sample(), 1.0).unconstrained_gib > first.unconstrained_gib
    file.write_text("not json")
    with pytest.raises(TypeError):  # measures again
        recompute.plan(build("dense"), sample(), 1.0)


def test_offload_can_be_ruled_out() -> None:
    model = build("moe", num_layers=4)
    source = invented(model)
    source.found = replace(
        source.found, link=Link(out_bytes_per_ms=1e12, back_bytes_per_ms=1e12,
                                slowdown_ms_per_byte=0.0),
    )  # fmt: skip
    moved = recompute.plan(model, sample(), 20.0, costs=source).actions.values()
    assert any(action.startswith("offload") for action in moved)
    kept_here = recompute.plan(model, sample(), 20.0, costs=source, offload=False)
    assert not any(action.startswith("offload") for action in kept_here.actions.values())


def test_layers_the_compiler_sees_all_of_do_not_offload() -> None:
    def offered(model: nn.Module) -> set[str]:
        return {action for u in find_units(model) for site in u.sites for action in site.actions}

    model = build("dense")
    assert "offload" in offered(model)
    for layer in model.layers:
        layer.compile(backend="eager")
    assert "offload" in offered(model)  # they offload around it
    model.compile(backend="eager")
    assert "offload" not in offered(model)
    assert "full" in offered(model)


def test_fixed_modes() -> None:
    model = build("moe")
    cheap = recompute.fixed(model, "selective").actions
    assert {cheap[f"layers.1{site}"] for site in (".attention", ".moe.shared")} == {"reemit"}
    assert cheap["layers.1.moe"] == "norm"
    assert cheap["layers.1"] == "keep"
    full = recompute.fixed(model, "full").actions
    assert full["layers.0.attention"] == full["layers.0.moe"] == "full"
    assert full["layers.0.moe.shared"] == "recompute"
    recompute.apply(model, recompute.fixed(model, "full"))
    few = kept(model)
    recompute.apply(model, recompute.fixed(model, "none"))
    assert few < 0.7 * kept(model)
    with pytest.raises(ConfigError, match="mode = 'most', expected none, selective or full"):
        recompute.fixed(model, "most")


def test_wrong_models_and_plans_are_named() -> None:
    with pytest.raises(ConfigError, match="Linear has no module with recompute_actions"):
        recompute.plan(nn.Linear(2, 2), (torch.ones(1, 2),), 1.0)
    with pytest.raises(ConfigError, match=r"no site 'layers\.2\.?\w*'; the plan is of another"):
        recompute.apply(build("dense", 2), recompute.fixed(build("dense", 3), "full"))
    frozen = build("dense").requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to differentiate; give targets"):
        recompute.plan(frozen, sample(), 1.0)


def test_the_table_sums_layers_that_do_the_same() -> None:
    model = build("moe", num_layers=4)
    plan = recompute.plan(model, sample(), 22.0, costs=invented(model))
    head, *rows, last = recompute.lines(plan)
    assert head.split() == ["layers", "site", "action", "GiB", "saved", "ms", "paid"]
    assert "4: layers.0 to layers.3  attention   rope" in "\n".join(rows)
    assert rows[0].split()[-2:] == ["3.000", "0.400"]
    assert last.startswith(f"predicted peak {plan.predicted_gib:.2f} GiB of 22, for ")


@pytest.mark.parametrize(
    ("budget_gib", "extra_gib", "field"),
    [
        (None, 0.0, "budget_gib = None"),
        ("60", 0.0, "budget_gib = '60'"),
        (-1.0, 0.0, "budget_gib = -1.0"),
        (float("nan"), 0.0, "budget_gib = nan"),
        (1.0, -2.0, "extra_gib = -2.0"),
        (1.0, float("inf"), "extra_gib = inf"),
    ],
)
def test_amounts_that_make_no_sense_are_named(budget_gib: Any, extra_gib: Any, field: str) -> None:
    model = build("dense")
    with pytest.raises(ConfigError, match=f"recompute.{field}, expected a "):
        recompute.plan(model, sample(), budget_gib, extra_gib=extra_gib)


def test_offload_is_a_yes_or_no() -> None:
    with pytest.raises(ConfigError, match="offload = 'no', expected True or False"):
        recompute.plan(build("dense"), sample(), 1.0, offload="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, torch.ones(2, 3), "ids"], ids=["none", "tensor", "text"])
def test_a_sample_is_a_set_of_arguments(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"sample is a \w+, expected the arguments of one"):
        recompute.plan(build("dense"), wrong, 1.0)


@pytest.mark.parametrize(
    "loss",
    [lambda _: 3.0, lambda _: torch.ones(2, requires_grad=True), lambda _: torch.ones(())],
    ids=["number", "vector", "detached"],
)
def test_a_loss_is_a_scalar_with_a_gradient(loss: Any) -> None:
    model = build("dense")
    with pytest.raises(ConfigError, match=r"the loss on the sample is .*, expected one number"):
        recompute.plan(model, sample(), 1.0, loss=loss)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_plan_that_does_not_fit_changes_nothing() -> None:
    model = build("dense")
    wrong = {"layers.0.attention": "rope", "layers.1.attention": "most"}
    with pytest.raises(ConfigError, match=r"layers\.1\.attention cannot 'most'"):
        recompute.apply(model, recompute.Plan(actions=wrong))
    assert model.get_submodule("layers.0.attention").recompute == "keep"


@pytest.mark.parametrize("frozen", [("embed", "layers.0"), ("embed", "layers")])
def test_frozen_layers_are_planned_for(frozen: tuple[str, ...], cache: Path) -> None:
    model = build("dense", num_layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    plan = recompute.plan(model, sample(), 100.0)
    assert set(plan.actions.values()) == {"keep"}
    # Below the first trained weight nothing is kept, so nothing can be given up there.
    assert plan.minimum_gib is not None
    least = recompute.plan(model, sample(), plan.minimum_gib)
    given_up = {row.layer for row in least.rows}
    assert not {name for name in given_up if name.startswith(frozen)}
    assert least.predicted_gib == plan.minimum_gib


def test_only_the_last_plan_itself_tells_that_none_fits():
    """What another plan was off by refuses nothing: not less budget than a plan was made for."""
    model = build("moe", num_layers=3)

    def off_by(actions):
        return 0 if any(action.startswith("offload") for action in actions.values()) else GIB

    costs = invented(model, off_by=off_by)
    edge = least(costs.units, costs.found).outcome.peak_bytes / GIB
    peaks = []
    for budget in (edge - 0.01, edge + 0.01, edge + 0.3):
        found = recompute.plan(model, sample(), budget, costs=invented(model, off_by=off_by))
        assert found.predicted_gib <= budget
        peaks.append(found.predicted_gib)
    assert peaks == sorted(peaks)
