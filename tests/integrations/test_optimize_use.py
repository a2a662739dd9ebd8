import copy
import inspect
import pickle
import re
from importlib.util import find_spec
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import slipstream
from slipstream.errors import ConfigError
from slipstream.integrations.hf_optimize_linear import adjacent, joint_linear
from slipstream.ops import dispatch
from slipstream.parallel.flat import FlatAdamW
from tests.budget import assert_budget
from tests.integrations.families import tokens
from tests.integrations.optimized import FAMILIES, loss_and_gradients, model_of, switch


def assert_all_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model, ids_BL = model_of(family), tokens()
    slipstream.optimize(model)
    expected = loss_and_gradients(model, ids_BL)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    dispatch.reset_counts()
    found = loss_and_gradients(model, ids_BL)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    ropes = sum(n for (op, _), n in dispatch.counts().items() if op in ("qkv_rope", "rope"))
    assert ropes == 4, "each of two layers runs in forward and again in backward"


def test_checkpointing_leaves_the_cache_to_the_first_run():
    model, ids_BL = model_of("llama"), tokens()
    slipstream.optimize(model)
    expected = loss_and_gradients(model, ids_BL)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    model(ids_BL, labels=ids_BL, use_cache=True).loss.backward()
    assert_all_close([p.grad for p in model.parameters()], expected[1:])


def _sites(model: nn.Module) -> dict[tuple[str, ...], list[nn.Module]]:
    found: dict[tuple[str, ...], list[nn.Module]] = {}
    for module in model.modules():
        if "recompute_actions" in vars(module):
            found.setdefault(module.recompute_actions, []).append(module)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "olmoe"])
def test_recompute_actions_change_no_gradient(family):
    model, ids_BL = model_of(family), tokens()
    slipstream.optimize(model)
    expected = loss_and_gradients(model, ids_BL)
    sites = _sites(model)
    assert [len(modules) for modules in sites.values()] == [2, 2, 2]
    for actions, modules in sites.items():
        for action in actions:
            for site in modules:
                site.recompute = action
            found = loss_and_gradients(model, ids_BL)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), action


def test_a_budget_is_planned_and_kept():
    # So large that the layers, not the loss, are what the peak is made of.
    model, ids_BL = model_of("llama", num_hidden_layers=3), tokens(4, 48)
    sample = {"input_ids": ids_BL, "labels": ids_BL}
    whole = slipstream.optimize(model, 64.0, sample).plan
    assert whole.rows == ()
    assert whole.minimum_gib < whole.unconstrained_gib
    expected = loss_and_gradients(model, ids_BL)
    model.eval().zero_grad()
    report = slipstream.optimize(model, whole.minimum_gib, sample)
    assert report.already
    assert report.plan.predicted_gib == whole.minimum_gib
    actions = [site.recompute for sites in _sites(model).values() for site in sites]
    assert len(actions) == 9
    assert len(set(actions)) > 1
    assert "predicted peak" in str(report)
    assert not model.training
    found = loss_and_gradients(model, ids_BL)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ConfigError, match="the least this model and batch can do with is"):
        slipstream.optimize(model, 1e-6, sample)
    slipstream.restore(model)
    with pytest.raises(ConfigError, match="the least this model and batch can do with is"):
        slipstream.optimize(model, 1e-6, sample)
    assert not slipstream.optimize(model).already, "a refused budget leaves the model as it was"
    with pytest.raises(ConfigError, match="needs sample"):
        slipstream.optimize(model, 64.0)


def test_training_fills_no_cache_unless_asked():
    model, ids_BL = model_of("llama").train(), tokens()
    slipstream.optimize(model)
    assert model(ids_BL, labels=ids_BL).past_key_values is None
    assert model(ids_BL, labels=ids_BL, use_cache=True).past_key_values is not None
    assert model(ids_BL).past_key_values is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_positions_of_its_own(family):
    model, ids_BL = model_of(family), tokens()
    mask = torch.ones_like(ids_BL)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = []
    for optimized in (False, True):
        switch(model, optimized)
        logits = model(ids_BL, attention_mask=mask, position_ids=positions).logits
        found.append([logits[mask.bool()]])
        call = {"attention_mask": mask, "position_ids": positions}
        found[-1] += loss_and_gradients(model, ids_BL, **call)
        model.eval()
    assert_all_close(found[1], found[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_what_stock_generates(family):
    model, ids_BL = model_of(family), tokens(2, 6)
    mask = torch.ones_like(ids_BL)
    mask[0, :2] = 0
    texts = []
    for optimized in (False, True):
        switch(model, optimized)
        call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        texts.append(model.generate(ids_BL, **call))
    assert texts[0].shape[1] > 6
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_autocast_runs_in_16_bits_around_a_stream_in_32(family):
    model, ids_BL = model_of(family, num_hidden_layers=1), tokens()
    found = []
    for optimized in (False, True):
        switch(model, optimized)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids_BL, output_hidden_states=True)
            found.append([h.float() for h in out.hidden_states])
        assert out.hidden_states[0].dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            gradients = loss_and_gradients(model, ids_BL)
        assert all(g.dtype == torch.float32 for g in gradients)
        found[-1] += gradients
        model.eval()
    switch(model, False)
    exact = [h.detach() for h in model(ids_BL, output_hidden_states=True).hidden_states]
    exact += loss_and_gradients(model, ids_BL)
    stock, ours = ([_error(a, b) for a, b in zip(f, exact, strict=True)] for f in found)
    assert sum(ours) <= 1.5 * sum(stock)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_compiled_layers_have_the_same_loss_and_gradients(family):
    model, ids_BL = model_of(family), tokens()
    slipstream.optimize(model)
    expected = loss_and_gradients(model, ids_BL)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_all_close(loss_and_gradients(model, ids_BL), expected)


def test_a_compiled_model_has_the_same_loss_and_gradients():
    model, ids_BL = model_of("qwen3_moe"), tokens()
    slipstream.optimize(model)
    expected = loss_and_gradients(model, ids_BL)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_all_close(loss_and_gradients(compiled, ids_BL), expected)


@pytest.mark.parametrize("items", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_the_loss_takes_what_trainers_give_it(items):
    model, ids_BL = model_of("llama").train(), tokens()
    shifted = F.pad(ids_BL, (0, 1), value=-1)[:, 1:].contiguous()
    calls = [
        {"labels": ids_BL, "num_items_in_batch": items},
        {"labels": ids_BL, "shift_labels": shifted, "ignore_index": -1},
    ]
    expected = [model(ids_BL, **call).loss for call in calls]
    slipstream.optimize(model)
    found = [model(ids_BL, **call) for call in calls]
    assert all(out.logits is None for out in found)
    assert_all_close([out.loss for out in found], expected)


def test_logits_come_back_when_asked_for():
    model, ids_BL = model_of("gemma2").train(), tokens()
    expected = model(ids_BL, labels=ids_BL)
    slipstream.optimize(model)
    whole = model(ids_BL, labels=ids_BL, skip_logits=False)
    assert_close(whole.logits, expected.logits)
    assert_close(model(ids_BL).logits, expected.logits)
    last = ids_BL[:, -3:]
    asked = model(ids_BL, labels=last, logits_to_keep=3)
    assert_close(asked.logits, expected.logits[:, -3:])
    as_tuple = model(ids_BL, labels=ids_BL, return_dict=False)
    assert_all_close(list(as_tuple[:2]), [expected.loss, expected.logits])
    model.eval()
    assert model(ids_BL, labels=ids_BL).logits is not None
    short = model(ids_BL, None, None, None, None, ids_BL, skip_logits=True)
    assert short.logits is None
    assert_close(short.loss, expected.loss)


def test_a_loss_function_of_its_own_gets_logits():
    model, ids_BL = model_of("llama").train(), tokens()
    slipstream.optimize(model)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    out = model(ids_BL, labels=ids_BL)
    assert_close(out.loss, out.logits.square().mean())


@pytest.mark.filterwarnings("ignore:.*two grouped products:RuntimeWarning")
def test_experts_that_run_in_steps_keep_their_own_gate():
    model, ids_BL = model_of("mixtral"), tokens()
    stock = type(model.model.layers[0].mlp.experts)
    gate = lambda self, h: h.chunk(2, dim=-1)[0].tanh()  # noqa: E731
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = type("TanhExperts", (stock,), {"_apply_gate": gate})
    model.set_experts_implementation("grouped_mm")
    found = []
    for optimized in (False, True):
        switch(model, optimized)
        found.append(loss_and_gradients(model, ids_BL))
    assert_all_close(found[1], found[0])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_router_logits_and_their_loss(family):
    model, ids_BL = model_of(family), tokens()
    mask = torch.ones_like(ids_BL)
    mask[1, :4] = 0
    found = []
    for optimized in (False, True):
        switch(model.train(), optimized)
        call = {"attention_mask": mask, "output_router_logits": True, "use_cache": False}
        out = model(ids_BL, labels=ids_BL, **call)
        found.append([out.loss, out.aux_loss, *out.router_logits])
        assert len(out.router_logits) == 2
    assert_all_close(found[1], found[0])


def test_hidden_states_are_those_of_stock():
    model, ids_BL = model_of("qwen3_moe"), tokens()
    expected = model(ids_BL, output_hidden_states=True).hidden_states
    slipstream.optimize(model)
    found = model(ids_BL, output_hidden_states=True).hidden_states
    assert_all_close(list(found), list(expected))


def test_hooks_still_run():
    model, ids_BL = model_of("qwen3_moe"), tokens()
    slipstream.optimize(model)
    layer, calls = model.model.layers[0], []
    for name, module in layer.named_modules():
        if name in ("input_layernorm", "self_attn.q_proj", "self_attn.q_norm", "mlp.experts"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    expected = model(ids_BL).logits
    assert sorted(calls) == [
        "input_layernorm",
        "mlp.experts",
        "self_attn.q_norm",
        "self_attn.q_proj",
    ]
    layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: 2 * out)
    assert not torch.allclose(model(ids_BL).logits, expected)


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, as adapter libraries put in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Base plus adapter."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("adapted_first", [True, False])
@pytest.mark.parametrize("names", [("q_proj",), ("q_proj", "v_proj", "up_proj", "down_proj")])
def test_adapters_act(names, adapted_first):
    model, ids_BL = model_of("qwen3"), tokens()
    if not adapted_first:
        slipstream.optimize(model)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name in names:
                if name in parent._modules:
                    setattr(parent, name, Adapter(getattr(parent, name)))
    found = []
    for optimized in (True, False):
        switch(model, optimized)
        found.append([model(ids_BL).logits, *loss_and_gradients(model, ids_BL)])
        model.eval()
    assert len(found[0]) == 2 + 2 * 2 * len(names)
    assert_all_close(*found)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_a_peft_model():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, ids_BL = peft.get_peft_model(model_of("llama"), config), tokens()
    found = []
    for optimized in (False, True):
        switch(model, optimized)
        found.append(loss_and_gradients(model, ids_BL))
    assert_all_close(found[1], found[0])


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_trainer_takes_the_same_steps(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in tokens(12)]
    losses = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model = model_of("llama")
        switch(model, optimized)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sharded_models(family, with_head, one_rank, recwarn):
    model, ids_BL = model_of(family), tokens()
    expected = loss_and_gradients(model, ids_BL)
    slipstream.optimize(model)
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in (*model.model.layers, *([model.lm_head] if with_head else [])):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.zero_grad()
    out = model.train()(ids_BL, labels=ids_BL)
    out.loss.backward()
    assert out.logits is None
    assert_all_close([out.loss, *(p.grad.full_tensor() for p in model.parameters())], expected)
    assert not any("view" in str(warning.message) for warning in recwarn)


def test_data_parallel_wrappers(one_rank):
    model, ids_BL = model_of("qwen3_moe"), tokens()
    expected = loss_and_gradients(model, ids_BL)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert slipstream.optimize(wrapped).count("moe") == 2
    assert_all_close(loss_and_gradients(wrapped, ids_BL), expected)


def test_a_forward_wrapped_before_or_after_keeps_its_wrapper():
    # As launchers do for mixed precision.
    model, ids_BL = model_of("llama").train(), tokens()

    def wrapped(function):
        def forward(self, *args, **kwargs):
            with torch.autocast("cpu", torch.bfloat16):
                return function(self, *args, **kwargs)

        return forward

    losses = []
    for optimized_first in (True, False):
        if optimized_first:
            slipstream.optimize(model)
        model.forward = MethodType(wrapped(model.forward.__func__), model)
        slipstream.optimize(model)
        out = model(ids_BL, labels=ids_BL)
        assert out.logits is None
        losses.append(out.loss)
        slipstream.restore(model)
        assert model(ids_BL).logits.dtype == torch.bfloat16
        del model.forward
    assert torch.equal(*losses)
    assert model(ids_BL).logits.dtype == torch.float32


def test_columns_a_trainer_keeps_are_those_of_stock():
    model = model_of("qwen3_moe")
    before = list(inspect.signature(model.forward).parameters)
    slipstream.optimize(model)
    assert list(inspect.signature(model.forward).parameters) == before


def test_a_wrapper_around_the_forward_outlives_restore():
    model, ids_BL = model_of("llama").train(), tokens()
    expected = model(ids_BL, labels=ids_BL).loss
    slipstream.optimize(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert model(ids_BL, labels=ids_BL).logits is None
    slipstream.restore(model)
    out = model(ids_BL, labels=ids_BL)
    assert torch.equal(out.loss, expected)
    assert out.logits is not None


def test_saved_weights_load_into_a_stock_model(tmp_path):
    model, ids_BL = model_of("qwen3_moe"), tokens()
    expected = model(ids_BL).logits
    slipstream.optimize(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager"
    )
    assert torch.equal(loaded(ids_BL).logits, expected)


def _linears(biased: bool) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(10, n, bias=biased) for n in (12, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_joint_linear_stays_in_the_budget_of_the_layers(biased, dtype):
    linears = _linears(biased)

    def run(function):
        def with_parameters(x, **given):
            return torch.func.functional_call(
                _Whole(linears, function), {f"linears.{k}": v for k, v in given.items()}, (x,)
            )

        return with_parameters

    given = {name: p.detach() for name, p in linears.named_parameters()}
    inputs = {"x": torch.randn(3, 7, 10), **given}
    separate = run(lambda x, linears: torch.cat([linear(x) for linear in linears], -1))
    assert_budget(run(joint_linear), separate, inputs, dtype)


class _Whole(nn.Module):
    def __init__(self, linears: nn.ModuleList, function) -> None:
        super().__init__()
        self.linears, self.function = linears, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.linears)


def test_weights_that_lie_side_by_side_are_not_copied():
    linears = _linears(False)
    flat = torch.randn(20, 10)
    x = torch.randn(5, 10, requires_grad=True)
    assert not adjacent([linear.weight for linear in linears])
    for linear, part in zip(linears, flat.split([12, 4, 4]), strict=True):
        linear.weight = nn.Parameter(part)
    assert adjacent([linear.weight for linear in linears])
    joint_linear(x, linears).square().sum().backward()
    found = [x.grad, *(linear.weight.grad for linear in linears)]
    x.grad = None
    linears.zero_grad()
    torch.cat([linear(x) for linear in linears], -1).square().sum().backward()
    assert_all_close(found, [x.grad, *(linear.weight.grad for linear in linears)])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_flat_storage_spares_the_copies(family):
    model, ids_BL = model_of(family), tokens()
    slipstream.optimize(model)
    expected = loss_and_gradients(model, ids_BL)
    optimizer = FlatAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for layer in model.model.layers:
        attention = layer.self_attn
        weights = [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert adjacent(weights)
        if family == "llama":
            assert adjacent([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    optimizer.step()
    assert_all_close(loss_and_gradients(model, ids_BL), expected)


def test_what_the_document_shows_runs(capsys):
    text = (Path(__file__).resolve().parents[2] / "docs" / "optimize.md").read_text()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "optimize.md", "exec"), names)
    assert "2 x Qwen3MoeDecoderLayer" in capsys.readouterr().out
    assert names["report"].count("norm") == 9
    assert not any("forward" in vars(module) for module in names["model"].modules())


def test_frozen_weights_get_no_gradient():
    linears = _linears(True).requires_grad_(False)
    linears[1].requires_grad_(True)
    x = torch.randn(5, 10, requires_grad=True)
    joint_linear(x, linears).sum().backward()
    assert [linear.weight.grad is not None for linear in linears] == [False, True, False]


@pytest.mark.parametrize("name", ["", ".input_layernorm", ".self_attn", ".mlp", ".mlp.gate"])
def test_a_wrapper_around_any_part_outlives_restore(name: str) -> None:
    # Device hooks of accelerate keep the forward they find.
    model, ids_BL = model_of("qwen3_moe"), torch.arange(12).view(2, 6)
    expected = loss_and_gradients(model, ids_BL)
    slipstream.optimize(model)
    module = model.get_submodule(f"model.layers.0{name}")
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.warns(RuntimeWarning, match="another forward was put around its own"):
        assert_all_close(loss_and_gradients(model, ids_BL), expected)
    slipstream.restore(model)
    for found, stock in zip(loss_and_gradients(model, ids_BL), expected, strict=True):
        assert torch.equal(found, stock)


@pytest.mark.parametrize("skip", [(), ("loss",)], ids=["all", "no-loss"])
def test_an_optimized_model_is_copied_but_not_pickled(skip: tuple[str, ...]) -> None:
    model, ids_BL = model_of("qwen3_moe"), torch.arange(12).view(2, 6)
    slipstream.optimize(model, skip=skip)
    expected = loss_and_gradients(model, ids_BL)
    other = copy.deepcopy(model)
    for found, ours in zip(loss_and_gradients(other, ids_BL), expected, strict=True):
        assert torch.equal(found, ours)
    with pytest.raises(ConfigError, match="is not pickled; save its state_dict"):
        pickle.dumps(model)
    slipstream.restore(model)
    assert pickle.loads(pickle.dumps(model)).config.vocab_size == model.config.vocab_size
