"""One optimizer step: weighing by tokens, exact clipping, the guard."""

import math

import pytest
import torch

from slipstream.data import Batch
from slipstream.errors import ConfigError
from slipstream.models import ModelConfig, MoEConfig, Transformer
from slipstream.parallel import Ranks
from slipstream.train.config import OptimConfig, TrainConfig
from slipstream.train.guard import BadPlace, earliest, first_bad_place
from slipstream.train.optimizer import AdamW
from slipstream.train.phases import PHASES, PhaseTimer
from slipstream.train.step import TrainStep, split

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), control=None)
MOE = MoEConfig(num_experts=4, top_k=2, d_ff=16, aux_loss=0.01, z_loss=0.001, expert_bias=True)


def make_model(moe: MoEConfig | None = MOE) -> Transformer:
    torch.manual_seed(1)
    return Transformer(
        ModelConfig(vocab_size=50, num_layers=2, d_model=32, num_heads=2, d_ff=64, moe=moe)
    )


def make_batch(rows: int = 8, ignored: int = 0) -> Batch:
    tokens = torch.randint(0, 50, (rows, 17))
    targets = tokens[:, 1:].clone()
    targets.view(-1)[:ignored] = -100
    return Batch(tokens_BL=tokens[:, :-1].contiguous(), targets_BL=targets, document_BL=None)


def make_step(
    model: Transformer, train: TrainConfig | None = None, optim: OptimConfig | None = None
) -> TrainStep:
    return TrainStep(
        model,
        model,
        AdamW(model, optim or OptimConfig(clip=math.inf)),
        train or TrainConfig(),
        ALONE,
        PhaseTimer(ALONE.device),
    )


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batches_with_uneven_tokens_give_the_gradient_of_the_whole(micro_batch: int) -> None:
    # 20 ignored targets: the first row does not count at all, the second only in part.
    batch = make_batch(ignored=20)
    results = []
    for size in (0, micro_batch):
        model = make_model()
        model.token_loss.z_loss = 1e-3
        step = make_step(model, TrainConfig(micro_batch=size))
        results.append((step.run(batch, lr=0.0), gradients(model)))
    (whole, expected), (split_up, got) = results
    assert whole.tokens == split_up.tokens == 8 * 16 - 20
    assert split_up.loss == pytest.approx(whole.loss, rel=1e-6)
    for name, grad in expected.items():
        error = (got[name] - grad).abs().max()
        assert error <= 8 * torch.finfo(torch.float32).eps * grad.abs().max(), name


def test_loss_is_the_mean_over_tokens_that_count() -> None:
    batch, model = make_batch(ignored=20), make_model(None)
    logits = model(batch.tokens_BL).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets_BL.flatten(), ignore_index=-100
    )
    result = make_step(model).run(batch, lr=1e-3)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("clip", [0.05, 1e9, math.inf])
def test_clipping_is_exact(clip: float) -> None:
    batch, model = make_batch(), make_model(None)
    result = make_step(model, optim=OptimConfig(clip=clip)).run(batch, lr=0.0)
    plain = make_model(None)
    make_step(plain).run(batch, lr=0.0)
    before = torch.cat([g.flatten() for g in gradients(plain).values()])
    after = torch.cat([g.flatten() for g in gradients(model).values()])
    assert result.grad_norm == pytest.approx(before.double().norm().item(), rel=1e-6)
    scale = min(1.0, clip / result.grad_norm)
    torch.testing.assert_close(after, before * scale, rtol=1e-6, atol=0)


def test_update_is_torch_adamw_with_vectors_not_decayed() -> None:
    batch, ours, theirs = make_batch(), make_model(None), make_model(None)
    optim = OptimConfig(clip=0.5, weight_decay=0.1)
    step = make_step(ours, optim=optim)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for lr in (1e-3, 2e-3, 1e-3):
        step.run(batch, lr=lr)
        step.optimizer.zero_grad()
        output = theirs(batch.tokens_BL, batch.targets_BL).loss
        (output.objective / output.tokens).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    batch, model = make_batch(), make_model()
    step = make_step(model)
    step.run(batch, lr=1e-3)
    step.optimizer.zero_grad()
    handle = model.layers[1].attention.register_forward_hook(lambda *a: a[2] * bad)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    moments = {
        n: {k: v.clone() for k, v in state.items()} for n, state in step.optimizer.state.items()
    }
    result = step.run(batch, lr=1e-3)
    assert result.skipped
    assert result.load is None
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for name, state in step.optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(value, moments[name][key]), (name, key)
    place = first_bad_place(model, batch, 0, ALONE.device)
    assert str(place) == "output of layers.1.attention"
    # Neither the skipped step nor the search for the place counts as load.
    for moe in model.moe_layers().values():
        assert float(moe.load_E.sum()) == float(moe.demand_E.sum()) == 0
    handle.remove()
    step.optimizer.zero_grad()
    assert not step.run(batch, lr=1e-3).skipped


def test_a_bad_gradient_is_named_nearest_the_loss() -> None:
    batch, model = make_batch(), make_model(None)
    step = make_step(model)
    # The forward pass is finite, the gradient that flows back out of layer 0 is not.
    handle = model.layers[0].mlp.w2.register_full_backward_hook(
        lambda module, grad_in, grad_out: (grad_in[0] * math.nan,)
    )
    assert step.run(batch, lr=1e-3).skipped
    handle.remove()
    place = first_bad_place(model, batch, 0, ALONE.device)
    assert str(place) == "gradient of layers.0.mlp.w13.weight"


def test_a_cause_on_one_rank_comes_before_the_gradients_it_spoils_on_all() -> None:
    gradient = BadPlace(kind="gradient", name="norm.weight")
    output = BadPlace(kind="output", name="layers.0.attention")
    weights = BadPlace(kind="weights", name="embed.weight")
    assert earliest([gradient, output, gradient]) == output
    assert earliest([output, weights]) == weights


def test_a_bad_weight_is_named_first() -> None:
    model = make_model(None)
    with torch.no_grad():
        model.layers[1].mlp.w13.weight[0, 0] = math.nan
    place = first_bad_place(model, make_batch(), 2, ALONE.device)
    assert str(place) == "weights of layers.1.mlp.w13.weight"


def test_expert_load_is_counted_over_micro_batches() -> None:
    batch, model = make_batch(), make_model()
    result = make_step(model, TrainConfig(micro_batch=2)).run(batch, lr=1e-3)
    assert result.load is not None
    assert 1.0 <= result.load.max_over_mean <= 2.0
    assert 0.0 < result.load.entropy <= 1.0
    assert result.load.unused == 0
    # 128 tokens, two slots each, four experts: smoothed over 32 steps from zero.
    smoothed = model.layers[0].moe.smoothed_E
    assert smoothed.sum().item() == pytest.approx(256 / 32)


def test_split_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"train\.micro_batch = 3 does not divide the 8"):
        split(make_batch(), 3)
    pieces = split(make_batch(), 4)
    assert [len(piece.tokens_BL) for piece in pieces] == [4, 4]


def test_phases_are_all_timed() -> None:
    step = make_step(make_model(None))
    step.run(make_batch(), lr=1e-3)
    spent = step.timer.take()
    assert set(spent) == {*PHASES, "host"}
    assert spent["forward"] > 0
    assert spent["backward"] > 0
    assert spent["optimizer"] > 0
    assert step.timer.take() == dict.fromkeys(PHASES, 0.0)
