"""A site takes the actions it offers and no other, from whoever sets one."""

import pytest

from slipstream import recompute
from slipstream.errors import ConfigError
from slipstream.nn.site import Site
from slipstream.recompute.sites import find_units
from tests.recompute.models import build


def sites(shape: str) -> dict[str, Site]:
    return {n: m for n, m in build(shape).named_modules() if isinstance(m, Site)}


@pytest.mark.parametrize("action", ["nonsense", "", None, "Keep", 0])
@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_an_unknown_action_is_refused_where_it_is_set(shape: str, action: object) -> None:
    for site in sites(shape).values():
        before, offered = site.recompute, ", ".join(site.recompute_actions)
        with pytest.raises(ConfigError) as error:
            site.recompute = action
        name = type(site).__name__
        assert str(error.value) == f"{name}.recompute = {action!r}, expected one of {offered}"
        assert site.recompute == before == "keep"


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_every_action_that_is_offered_is_taken(shape: str) -> None:
    for site in sites(shape).values():
        for action in site.recompute_actions:
            site.recompute = action
            assert site.recompute == action


def test_every_module_that_a_plan_can_set_is_a_site() -> None:
    model = build("moe")
    found = {site.name for unit in find_units(model) for site in unit.sites}
    assert found == {name for name, m in model.named_modules() if isinstance(m, Site)}
    recompute.apply(model, recompute.fixed(model, "full"))
    acting = {type(m).__name__: m.recompute for m in model.modules() if isinstance(m, Site)}
    assert acting == {"Layer": "keep", "Attention": "full", "MLP": "recompute", "MoE": "full"}
