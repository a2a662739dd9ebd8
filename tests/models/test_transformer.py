"""The decoder: causality, packed documents, variants, dtypes, the loss, compilation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from slipstream.errors import ConfigError, ShapeError
from slipstream.models import ModelConfig, Transformer
from slipstream.nn.attention import Positions
from slipstream.ops import rope_tables

VOCAB = 37
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 3,
    "d_model": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 20,
    "max_seq_len": 64,
    "init_std": 0.2,
}
MOE: dict[str, Any] = {"num_experts": 5, "top_k": 2, "d_ff": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_embeddings": True},
    "biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "layernorm-gelu": {"norm": "layer", "norm_bias": True, "activation": "gelu"},
    "relu2-fp32cast": {"activation": "relu2", "norm_cast": "fp32"},
    "qk-head-wide": {"qk_norm": "head", "head_dim": 10},
    "qk-full-clip": {"qk_norm": "full", "clip_qkv": 0.5},
    "half-rope-softcap": {"rope": {"fraction": 0.5}, "head_dim": 8, "logit_softcap": 2.0},
    "moe": {"moe": MOE},
    "moe-every-shared": {"moe": {**MOE, "every": 2, "shared_d_ff": 8, "normalize": True}},
    "moe-first-dense": {"moe": {**MOE, "first_dense": 2, "scale": 2.5}},
    "moe-sigmoid-bias-groups": {
        "moe": {
            **MOE,
            **{"num_experts": 6, "score": "sigmoid", "expert_bias": True, "normalize": True},
            **{"num_groups": 3, "top_groups": 2, "aux_loss": 0.01, "z_loss": 0.001},
        }
    },
}


def build(**values: Any) -> Transformer:
    return Transformer(ModelConfig.model_validate(BASE | values))


def tokens(batch: int = 2, length: int = 13) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_leaves_earlier_logits(variant: str) -> None:
    model, first = build(**VARIANTS[variant]).eval(), tokens()
    second = first.clone()
    second[:, 8] = (second[:, 8] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(first).logits, model(second).logits
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert ((before - after)[:, 8:].abs().amax((0, 2)) > 1e-4).all()


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_packed_documents_equal_separate_ones(variant: str) -> None:
    model, batch = build(**VARIANTS[variant]).eval(), tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    # RoPE is relative, so a document that starts at 5 sees what it would see from 0.
    with torch.no_grad():
        packed = model(batch, document_BL=documents).logits
        apart = torch.cat([model(batch[:, :5]).logits, model(batch[:, 5:]).logits], dim=1)
        mixed = model(batch).logits
    assert torch.allclose(packed, apart, atol=1e-5)
    assert not torch.allclose(packed[:, 5:], mixed[:, 5:], atol=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_and_every_gradient_equal_those_of_the_logits(variant: str) -> None:
    model, batch = build(**VARIANTS[variant]), tokens()
    targets = tokens()
    targets[0, :4] = -100
    out = model(batch, targets)
    out.loss.objective.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(batch).logits
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    nll.backward()
    assert out.logits is None
    assert out.loss.tokens.item() == 22
    assert out.loss.nll.item() == pytest.approx(nll.item(), rel=1e-6)
    z = torch.logsumexp(logits, -1).square().flatten()[targets.flatten() != -100].sum()
    assert out.loss.z.item() == pytest.approx(z.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert gradients[name].abs().max() > 0, name
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5, name


def test_gradients_equal_finite_differences() -> None:
    model = build(**VARIANTS["moe-every-shared"]).double()
    batch, targets, eps = tokens(), tokens(), 1e-6
    model(batch, targets).loss.objective.backward()
    for name, parameter in model.named_parameters():
        index = parameter.grad.abs().argmax()
        flat = parameter.detach().view(-1)
        values = []
        for sign in (1, -1):
            flat[index] += sign * eps
            with torch.no_grad():
                values.append(model(batch, targets).loss.nll.item())
            flat[index] -= sign * eps
        expected = (values[0] - values[1]) / (2 * eps)
        assert parameter.grad.view(-1)[index].item() == pytest.approx(expected, rel=1e-3), name


def test_tied_embeddings_are_one_matrix() -> None:
    model = build(tie_embeddings=True)
    assert model.head is None
    assert "head.weight" not in model.state_dict()
    hidden, _ = model.hidden(tokens(1, 4))
    logits = model.eval()(tokens(1, 4)).logits
    assert logits.shape[-1] == VOCAB
    with torch.no_grad():
        model.embed.weight.mul_(0)
    assert hidden.abs().max() > 0
    assert model(tokens(1, 4)).logits.abs().max() == 0


@pytest.mark.parametrize(
    ("moe", "layers"),
    [({}, [0, 1, 2]), ({"every": 2}, [0, 2]), ({"first_dense": 1, "every": 2}, [1])],
)
def test_which_layers_have_experts(moe: dict[str, Any], layers: list[int]) -> None:
    model = build(moe={**MOE, **moe})
    assert list(model.moe_layers()) == [f"layers.{layer}.moe" for layer in layers]
    dense = [i for i, layer in enumerate(model.layers) if layer.mlp is not None]
    assert sorted(dense + layers) == [0, 1, 2]


@pytest.mark.parametrize("variant", ["dense", "moe-every-shared", "layernorm-gelu", "tied"])
def test_bf16_compute_gives_fp32_gradients(variant: str) -> None:
    model, batch, targets = build(**VARIANTS[variant]), tokens(), tokens()
    exact = model(batch, targets).loss.nll
    model.compute_dtype = torch.bfloat16
    hidden, _ = model.hidden(batch)
    assert hidden.dtype == torch.bfloat16
    rounded = model(batch, targets).loss.objective
    assert rounded.dtype == torch.float32
    rounded.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    # 8 bits of mantissa; equal would mean that nothing was computed in bf16.
    assert rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)


def test_clip_bounds_queries_keys_and_values() -> None:
    plain, clipped = build(), build(clip_qkv=0.05)
    clipped.load_state_dict(plain.state_dict())
    qkv = torch.randn(2, 5, clipped.layers[0].attention.wqkv.weight.shape[0])
    for part in clipped.layers[0].attention._project(qkv):
        assert part.abs().max().item() == pytest.approx(0.05)
    assert plain.layers[0].attention._project(qkv)[0].abs().max() > 0.05
    batch = tokens()
    assert not torch.allclose(plain(batch).logits, clipped(batch).logits)


def test_softcap_bounds_logits() -> None:
    plain, capped = build(init_std=1.0), build(init_std=1.0, logit_softcap=3.0)
    capped.load_state_dict(plain.state_dict())
    batch = tokens()
    logits = plain(batch).logits
    assert logits.abs().max() > 3
    assert torch.allclose(capped(batch).logits, 3 * torch.tanh(logits / 3))


def test_router_losses_are_the_weighted_sum_over_layers() -> None:
    moe = {**MOE, "every": 2, "aux_loss": 0.5, "z_loss": 0.25}
    model, batch = build(moe=moe), tokens()
    routings = []
    for block in model.moe_layers().values():
        block.register_forward_hook(lambda _m, _i, out: routings.append(out[1]))
    loss = model(batch).router_loss
    assert len(routings) == 2
    expected = sum(0.5 * r.aux_loss.item() + 0.25 * r.z_loss.item() for r in routings)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(r.aux_loss.item() > 0.5 and r.z_loss.item() > 0 for r in routings)
    loss.backward()
    assert all(m.router.grad.abs().max() > 0 for m in model.moe_layers().values())
    assert build()(batch).router_loss.item() == 0.0


def test_a_sequence_that_is_too_long_is_refused() -> None:
    assert build(max_seq_len=8)(tokens(1, 8)).logits.shape == (1, 8, VOCAB)
    with pytest.raises(ShapeError, match=r"9 long, model\.max_seq_len is 8"):
        build(max_seq_len=8)(tokens(1, 9))


def test_initial_weights() -> None:
    config = ModelConfig(num_layers=8, d_model=128, moe={"num_experts": 4, "top_k": 1, "d_ff": 64})
    model = Transformer(config)
    out_std = 0.02 / 16**0.5
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            into_residual = name.endswith(("wo.weight", "w2"))
            wanted = out_std if into_residual else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1), name
            assert abs(parameter.mean().item()) < wanted / 10, name


@pytest.mark.parametrize("variant", ["dense", "qk-full-clip", "moe", "moe-every-shared"])
def test_a_layer_compiles_into_one_graph_equal_to_eager(variant: str) -> None:
    torch.manual_seed(1)
    model = build(**VARIANTS[variant])
    layer, spec = model.layers[0], model.config.rope_spec()
    cos, sin = rope_tables(spec, 7)
    positions = Positions(cos_LC=cos, sin_LC=sin, mask_BLL=None)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        inputs = [t.requires_grad_() for t in torch.randn(2, 2, 7, 24, generator=seeded()).unbind()]
        model.zero_grad()
        branch, residual, loss = function(inputs[0], inputs[1], positions)
        (branch.square().sum() + residual.sin().sum() + loss).backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        results.append([branch.detach(), residual.detach(), *(t.grad for t in inputs), *grads])
    for eager, compiled in zip(*results, strict=True):
        assert torch.allclose(eager, compiled, atol=1e-5, rtol=1e-5)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"d_model": 25}, "d_model = 25 is not divisible by num_heads = 4"),
        ({"num_kv_heads": 3}, "num_heads = 4 is not divisible by num_kv_heads = 3"),
        ({"head_dim": 5}, "rope turns 5 features"),
        ({"rope": {"scaling": "longrope"}}, "rope.long_factor needs 3 numbers"),
        ({"moe": {**MOE, "top_k": 6}}, "top_k = 6 exceeds num_experts = 5"),
        ({"moe": {**MOE, "num_groups": 2}}, "num_groups = 2 does not divide num_experts = 5"),
        ({"moe": {**MOE, "num_groups": 5, "top_groups": 6}}, "top_groups = 6 exceeds"),
        ({"moe": {**MOE, "num_groups": 5}}, "top_k = 2 exceeds the 1 experts"),
        ({"moe": {**MOE, "top_k": 0}}, "greater than 0"),
        ({"num_layers": 0}, "greater than 0"),
        ({"rope": {"factor": 0.5}}, "greater than or equal to 1"),
        ({"d_modl": 24}, "Extra inputs"),
    ],
)
def test_config_errors(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate(BASE | values)
    assert named in str(caught.value)
    assert not isinstance(caught.value, ConfigError)
