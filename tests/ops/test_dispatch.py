import re
import warnings
from collections.abc import Iterator

import pytest
import torch

from slipstream.errors import HardwareError
from slipstream.ops import dispatch
from slipstream.ops.dispatch import Refusal

CPU = torch.device("cpu")


def _refuse_negative(x: torch.Tensor, mode: str = "") -> Refusal | None:
    if mode == "remedy":
        return Refusal(reason="mode is remedy", remedy="use another mode")
    if mode == "hopeless":
        return Refusal(reason="mode is hopeless")
    return None


@pytest.fixture
def toy() -> Iterator[str]:
    """An op with a picky fast implementation, gone after the test with all it left behind."""
    before = {name: dict(getattr(dispatch, name)) for name in ("_OPS", "_COUNTS")}
    warned = set(dispatch._WARNED)
    dispatch.register(
        "toy",
        ("fast", lambda x, mode="": x + 1, _refuse_negative),
        ("plain", lambda x, mode="": 1 + x, None),
        example=lambda device, dtype: ((torch.ones(2, device=device, dtype=dtype), "remedy"), {}),
    )
    dispatch.reset_counts()
    yield "toy"
    for name, content in before.items():
        getattr(dispatch, name).clear()
        getattr(dispatch, name).update(content)
    dispatch._WARNED.clear()
    dispatch._WARNED.update(warned)


def test_the_first_implementation_that_does_not_refuse_serves(toy):
    x = torch.ones(2)
    dispatch.call(toy, x)
    dispatch.call(toy, x)
    dispatch.call(toy, x, mode="hopeless")
    assert dispatch.counts() == {(toy, "fast"): 2, (toy, "plain"): 1}


def test_counts_are_a_copy_and_can_be_reset(toy):
    dispatch.call(toy, torch.ones(2))
    dispatch.counts()[toy, "fast"] = 99
    assert dispatch.counts() == {(toy, "fast"): 1}
    dispatch.reset_counts()
    assert dispatch.counts() == {}


def test_a_refusal_with_a_remedy_warns_once_with_both(toy):
    message = "toy: fast is not used: mode is remedy; use another mode"
    with pytest.warns(RuntimeWarning, match=re.escape(message)) as caught:
        dispatch.call(toy, torch.ones(2), "remedy")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.call(toy, torch.ones(2), "remedy")


def test_a_refusal_without_a_remedy_is_silent(toy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(dispatch.call(toy, torch.ones(2), "hopeless"), torch.full((2,), 2.0))


def test_explain_names_what_is_used_and_what_was_passed_over(toy):
    choice = dispatch.explain(toy, CPU, torch.float32)
    refusal = Refusal(reason="mode is remedy", remedy="use another mode")
    assert (choice.op, choice.used, choice.passed_over) == (toy, "plain", (("fast", refusal),))
    assert dispatch.counts() == {}


def test_force_chooses_and_restores(toy):
    with dispatch.force(toy="plain"):
        dispatch.call(toy, torch.ones(2))
        with dispatch.force(toy="fast"):
            dispatch.call(toy, torch.ones(2))
        dispatch.call(toy, torch.ones(2))
    dispatch.call(toy, torch.ones(2))
    assert dispatch.counts() == {(toy, "plain"): 2, (toy, "fast"): 2}


def test_force_restores_after_an_error(toy):
    with pytest.raises(ZeroDivisionError), dispatch.force(toy="plain"):
        raise ZeroDivisionError
    dispatch.call(toy, torch.ones(2))
    assert dispatch.counts() == {(toy, "fast"): 1}


def test_a_forced_implementation_that_refuses_raises_with_its_reason(toy):
    message = "toy: no implementation serves this call (forced: fast); fast: mode is hopeless"
    with dispatch.force(toy="fast"), pytest.raises(HardwareError, match=re.escape(message)):
        dispatch.call(toy, torch.ones(2), "hopeless")


@pytest.mark.parametrize(
    ("chosen", "known"), [({"toy": "cuda"}, "fast, plain"), ({"nothing": "fast"}, "toy")]
)
def test_forcing_what_does_not_exist_lists_what_does(toy, chosen, known):
    ((op, name),) = chosen.items()
    message = f"force: {op}={name} does not exist.*{known}"
    with pytest.raises(HardwareError, match=message), dispatch.force(**chosen):
        dispatch.call(toy, torch.ones(2))


def test_nothing_that_serves_is_an_error(toy):
    dispatch.register(toy, ("fast", lambda x: x, lambda x: Refusal(reason="never")), example=None)
    with pytest.raises(HardwareError, match="toy: no implementation serves this call; fast: never"):
        dispatch.call(toy, torch.ones(2))


def test_a_compiled_graph_counts_once_and_warns_while_tracing(toy):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: dispatch.call(toy, x, "remedy"), fullgraph=True, backend="eager"
    )
    with pytest.warns(RuntimeWarning, match="mode is remedy") as caught:
        outputs = [compiled(torch.ones(2)) for _ in range(3)]
    assert torch.equal(outputs[2], torch.full((2,), 2.0))
    assert dispatch.counts() == {(toy, "plain"): 1}
    assert len([w for w in caught if "toy" in str(w.message)]) == 1


@pytest.mark.parametrize("op", dispatch.ops())
def test_every_implementation_runs_the_example_of_its_op(op):
    choice = dispatch.explain(op, CPU, torch.float32)
    names = dispatch.implementations(op)
    assert choice.used in names
    passed_over = [name for name, _ in choice.passed_over]
    served = [name for name in names if name not in passed_over]
    dispatch.reset_counts()
    for name in served:
        args, kwargs = dispatch.example(op, CPU, torch.float32)
        with dispatch.force(**{op: name}):
            dispatch.call(op, *args, **kwargs)
    counted = {key: count for key, count in dispatch.counts().items() if key[0] == op}
    assert counted == {(op, name): 1 for name in served}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", dispatch.ops())
def test_some_implementation_serves_the_example_in_every_dtype(op, dtype):
    args, kwargs = dispatch.example(op, CPU, dtype)
    dispatch.reset_counts()
    dispatch.call(op, *args, **kwargs)
    assert sum(count for key, count in dispatch.counts().items() if key[0] == op) == 1
