"""An optimized model that is changed afterwards: right, followed where it can be, never silent."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import slipstream
from slipstream.errors import ConfigError
from slipstream.ops import dispatch
from tests.integrations.families import tokens
from tests.integrations.optimized import loss_and_gradients, model_of, switch

FAMILIES = ("llama", "gemma2", "qwen3_moe")


def assert_all_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, wanted)


def sites(model: nn.Module, kind: str) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith(kind)]


@pytest.mark.parametrize("asked", [False, True], ids=["eager", "output_attentions"])
@pytest.mark.parametrize("action", ["keep", "reemit", "rope", "recompute", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_are_those_of_stock_under_every_action(family, action, asked):
    model, ids_BL = model_of(family, attn_implementation="eager"), tokens()
    call = {"output_attentions": True} if asked else {}
    found = []
    for optimized in (False, True):
        switch(model, optimized)
        if optimized:
            for attention in sites(model, "Attention"):
                attention.recompute = action
        model.train().zero_grad()
        out = model(ids_BL, labels=ids_BL, use_cache=False, **call)
        weights = list(out.attentions or ())
        assert len(weights) == (2 if asked else 0)
        # Weights are part of the graph, as they are in stock.
        (out.loss + sum(w.square().mean() for w in weights)).backward()
        found.append([out.loss, *weights, *(p.grad.clone() for p in model.parameters())])
    assert_all_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["Attention", "MLP", "SparseMoeBlock", "DecoderLayer"])
@pytest.mark.parametrize("action", ["nonsense", None, ""])
def test_an_action_that_a_site_does_not_know_is_refused(kind, action):
    model, ids_BL = model_of("llama" if kind == "MLP" else "qwen3_moe"), tokens()
    slipstream.optimize(model)
    site = sites(model, kind)[0]
    site.recompute = action
    match = rf"{type(site).__name__}\.recompute = {action!r}, expected one of keep, "
    with pytest.raises(ConfigError, match=match):
        loss_and_gradients(model, ids_BL)
    site.recompute = "keep"
    loss_and_gradients(model, ids_BL)


def losses_called() -> int:
    return sum(n for (op, _), n in dispatch.counts().items() if op == "linear_cross_entropy")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [17, 80])
@pytest.mark.parametrize("family", FAMILIES)
def test_resized_embeddings_are_followed(family, size, tied):
    model, ids_BL = model_of(family, tie_word_embeddings=tied), tokens() % 17
    slipstream.optimize(model)
    loss_and_gradients(model, ids_BL)
    model.resize_token_embeddings(size)
    dispatch.reset_counts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loss_and_gradients(model, ids_BL)
    assert losses_called() == 1
    assert model(ids_BL, labels=ids_BL).logits is None
    slipstream.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_all_close(found, loss_and_gradients(model, ids_BL))
    assert model(ids_BL, labels=ids_BL).logits.shape[-1] == size


class Head(nn.Linear):
    """A head of the user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice as large."""
        return 2 * super().forward(x)


def other_head(model: nn.Module, kind: str) -> None:
    old = model.lm_head
    if kind == "hooked":
        old.register_forward_hook(lambda _module, _args, out: 2 * out)
        return
    new = Head if kind == "class" else nn.Linear
    model.lm_head = new(old.in_features, old.out_features, bias=kind == "bias")


@pytest.mark.parametrize("kind", ["class", "bias", "hooked"])
def test_a_head_that_cannot_make_the_loss_is_named_once(kind):
    model, ids_BL = model_of("llama"), tokens()
    slipstream.optimize(model)
    other_head(model, kind)
    with pytest.warns(RuntimeWarning, match="LlamaForCausalLM makes logits while training: ") as w:
        found = loss_and_gradients(model, ids_BL)
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_and_gradients(model, ids_BL)
    report = slipstream.optimize(model)
    assert [row.module for row in report.kept] == ["LlamaForCausalLM"]
    slipstream.restore(model)
    assert_all_close(found, loss_and_gradients(model, ids_BL))


class Double(nn.Module):
    """A norm of the user's own, which is none of ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(inner.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not normed at all."""
        return 2 * x * self.weight


PLACES = (
    "model.norm",
    "model.layers.0.input_layernorm",
    "model.layers.1.self_attn.q_norm",
    "model.layers.1.self_attn",
    "model.layers.0.mlp",
    "model.layers.1",
    "model.layers",
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_part_put_in_place_later_runs_our_code_too(family, place):
    torch.manual_seed(1)
    model, other, ids_BL = model_of(family), model_of(family), tokens()
    replaced = slipstream.optimize(model).replaced
    for attention in sites(model, "Attention"):
        attention.recompute = "rope"
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, other.get_submodule(place))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loss_and_gradients(model, ids_BL)
    report = slipstream.optimize(model)
    assert report.replaced == replaced
    assert report.kept == ()
    if place == "model.layers.1.self_attn":
        assert model.get_submodule(place).recompute == "rope"
    slipstream.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_all_close(found, loss_and_gradients(model, ids_BL))


@pytest.mark.parametrize("place", ["model.norm", "model.layers.0.input_layernorm"])
def test_a_part_that_computes_something_else_is_named_once(place):
    model, ids_BL = model_of("qwen3_moe"), tokens()
    slipstream.optimize(model)
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, Double(model.get_submodule(place)))
    copied = copy.deepcopy(model)
    found = []
    for one in (model, copied):
        with pytest.warns(RuntimeWarning, match=f"{place[6:]} .Double.: it is not recognised") as w:
            found.append(loss_and_gradients(one, ids_BL))
        assert len(w) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_and_gradients(one, ids_BL)
        slipstream.restore(one)
        assert_all_close(found[-1], loss_and_gradients(one, ids_BL))
        assert not one.model._forward_pre_hooks


def test_skipped_kinds_stay_skipped_in_parts_put_in_place_later():
    model, other, ids_BL = model_of("qwen3"), model_of("qwen3"), tokens()
    replaced = slipstream.optimize(model, skip=("mlp",)).replaced
    model.model.layers[0] = other.model.layers[0]
    with pytest.warns(RuntimeWarning, match=r"layers.0.mlp .Qwen3MLP.: skipped"):
        loss_and_gradients(model, ids_BL)
    assert slipstream.optimize(model).replaced == replaced


def test_parts_are_recognised_under_autocast():
    model, other, ids_BL = model_of("qwen3_moe"), model_of("qwen3_moe"), tokens()
    replaced = slipstream.optimize(model).replaced
    model.model.layers[0] = other.model.layers[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss_and_gradients(model, ids_BL)
    assert slipstream.optimize(model).replaced == replaced


def test_what_an_earlier_call_left_out_is_replaced_by_the_next():
    model, ids_BL = model_of("qwen3"), tokens()
    whole = slipstream.optimize(model).replaced
    slipstream.restore(model)
    slipstream.optimize(model.model)
    report = slipstream.optimize(model)
    assert not report.already
    assert report.replaced == whole
    slipstream.restore(model.model)
    assert slipstream.optimize(model).replaced == whole
    assert slipstream.optimize(model).already
    found = loss_and_gradients(model, ids_BL)
    slipstream.restore(model)
    assert_all_close(found, loss_and_gradients(model, ids_BL))


@pytest.mark.parametrize("state", ["autocast", "inference_mode", "meta", "bf16"])
def test_what_surrounds_the_call_changes_nothing(state):
    model = model_of("qwen3_moe")
    replaced = slipstream.optimize(model).replaced
    slipstream.restore(model)
    contexts = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "inference_mode": torch.inference_mode(),
        "meta": torch.device("meta"),
        "bf16": _default_dtype(torch.bfloat16),
    }
    with contexts[state]:
        assert slipstream.optimize(model).replaced == replaced
    assert torch.isfinite(loss_and_gradients(model, tokens())[0])


@contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "sample", [[1], {1: 2}, {"input_ids": tokens()}], ids=["list", "number", "no-labels"]
)
def test_a_sample_that_is_no_training_call_is_refused(sample):
    model = model_of("qwen3")
    with pytest.raises(ConfigError, match=r"optimize: sample .*expected .*training call"):
        slipstream.optimize(model, 4.0, sample)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_on_meta_is_optimized_and_filled_later():
    model, ids_BL = model_of("qwen3_moe"), tokens()
    expected = loss_and_gradients(model, ids_BL)
    with torch.device("meta"):
        empty = type(model)(model.config)
    slipstream.optimize(empty)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    empty.model.rotary_emb = model.model.rotary_emb
    assert_all_close(loss_and_gradients(empty, ids_BL), expected)


@pytest.mark.parametrize("call", [{}, {"use_cache": False}], ids=str)
def test_a_model_without_a_head_is_planned_too(call):
    model = model_of("qwen3").model
    report = slipstream.optimize(model, 4.0, {"input_ids": tokens(), **call})
    assert report.plan.rows == ()


@pytest.mark.parametrize("again", [False, True])
def test_a_changed_head_is_followed_before_it_is_compiled(again):
    model, ids_BL = model_of("qwen3"), tokens()
    slipstream.optimize(model)
    model.resize_token_embeddings(80)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if not again:
        with pytest.raises(Exception, match=r"call slipstream\.optimize once more before"):
            loss_and_gradients(compiled, ids_BL)
        return
    slipstream.optimize(model)
    assert_all_close(loss_and_gradients(compiled, ids_BL), loss_and_gradients(model, ids_BL))


def test_a_head_that_the_report_named_is_compiled():
    model, ids_BL = model_of("qwen3"), tokens()
    slipstream.optimize(model)
    other_head(model, "bias")
    assert "lm_head" in slipstream.optimize(model).kept[0].reason
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        expected = loss_and_gradients(model, ids_BL)
        assert_all_close(loss_and_gradients(compiled, ids_BL), expected)
