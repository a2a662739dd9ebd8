"""FlatAdamW in the place of torch.optim.AdamW: same bits, schedulers, state dicts, parameters."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import CheckpointError, ConfigError, TrainingError
from slipstream.parallel.flat import FlatAdamW

STEPS = 6


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(13, 17), nn.GELU(), nn.LayerNorm(17), nn.Linear(17, 5, bias=False)
    return nn.Sequential(*layers).to(dtype)


def backward(model: nn.Module, step: int, micro: int = 0) -> float:
    generator = torch.Generator().manual_seed(10 * step + micro)
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(8, 13, generator=generator).to(dtype)).float().square().mean()
    loss.backward()
    return loss.item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS), micro: int = 1
) -> list[float]:
    losses = []
    for step in steps:
        losses += [backward(model, step, i) for i in range(micro)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("gradients", ["separate", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_trains_what_torch_optim_adamw_trains(dtype: torch.dtype, gradients: str) -> None:
    model, other = make_model(dtype), make_model(dtype)
    stock = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    flat = FlatAdamW(model, lr=1e-2, masters=False, moments=dtype, gradients=gradients)
    assert train(model, flat, micro=2) == train(other, stock, micro=2)
    assert_equal_weights(model, other)


def test_groups_and_schedulers_set_rates_and_decay() -> None:
    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        vectors = [p for p in model.parameters() if p.dim() < 2]
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]

    def run(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> nn.Module:
        model = make_model()
        optimizer = kind(groups(model), lr=1e-2, weight_decay=0.3, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return model

    assert_equal_weights(run(FlatAdamW), run(torch.optim.AdamW, fused=True))


def test_parameters_are_views_in_forward_order_and_keep_names_and_shapes() -> None:
    model, other = make_model(), make_model()
    FlatAdamW(model)
    assert_equal_weights(model, other)
    assert [p.shape for p in model.parameters()] == [p.shape for p in other.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    assert addresses == sorted(addresses)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    assert all((address - addresses[0]) % 128 == 0 for address in addresses)
    alone = copy.deepcopy(model)
    assert_equal_weights(alone, other)


KINDS = {
    "masters": {},
    "stochastic": {"stochastic_rounding": True, "seed": 7},
    "stochastic-bf16": {"stochastic_rounding": True, "moments": torch.bfloat16},
    "nearest": {"masters": False, "moments": torch.bfloat16},
    "clipped": {"max_norm": 0.1},
    "flat": {"gradients": "flat"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_goes_on_to_the_bit(kind: str) -> None:
    model = make_model(torch.bfloat16)
    optimizer = FlatAdamW(model, lr=1e-2, **KINDS[kind])
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    rest = train(model, optimizer, range(3, STEPS))
    file.seek(0)
    saved = torch.load(file)
    resumed = make_model(torch.bfloat16)
    again = FlatAdamW(resumed, lr=5.0, **KINDS[kind])
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(resumed, again, range(3, STEPS)) == rest
    assert_equal_weights(resumed, model)


def test_a_state_of_torch_optim_adamw_is_taken_over_and_given_back() -> None:
    model, other = make_model(), make_model()
    stock = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    train(other, stock, range(3))
    flat = FlatAdamW(model, lr=1e-2)
    model.load_state_dict(other.state_dict())
    flat.load_state_dict(stock.state_dict())
    assert train(model, flat, range(3, 5)) == train(other, stock, range(3, 5))
    back = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    back.load_state_dict(copy.deepcopy(flat.state_dict()))
    assert train(model, flat, range(5, 7)) == train(other, back, range(5, 7))
    assert_equal_weights(model, other)


def test_masters_follow_what_is_written_into_the_weights() -> None:
    model = make_model(torch.bfloat16)
    optimizer = FlatAdamW(model, lr=1e-2)
    train(model, optimizer, range(2))
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(3.0)
    backward(model, 2)
    optimizer.step()
    assert (optimizer.state[weight]["master"] - 3.0).abs().max() <= 0.04
    assert torch.equal(weight, optimizer.state[weight]["master"].bfloat16())


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    model, other = make_model(), make_model()
    flat = FlatAdamW(model, lr=1e-2)
    stock = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    for one, optimizer in ((model, flat), (other, stock)):
        for step in range(3):
            backward(one, step)
            one[2].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(model, other)
    before = copy.deepcopy(model)
    flat.step()
    assert_equal_weights(model, before)


def test_clipping_and_the_guard_are_folded_in() -> None:
    model, other = make_model(), make_model()
    flat = FlatAdamW(model, lr=1e-2, max_norm=0.05)
    stock = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        backward(model, step)
        backward(other, step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
        for param in other.parameters():
            param.grad /= (norm / 0.05).clamp(min=1.0)
        for optimizer in (flat, stock):
            optimizer.step()
            optimizer.zero_grad()
        assert flat.grad_norm == norm
        assert not flat.skipped
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine - theirs).abs().max() <= STEPS * 2e-7 * theirs.abs().max()
    before = copy.deepcopy(model)
    backward(model, 0)
    model[3].weight.grad[0, 0] = float("nan")
    flat.step()
    assert flat.skipped
    assert_equal_weights(model, before)
    assert flat.state[model[0].weight]["step"] == STEPS


def test_flat_gradients_are_added_up_in_fp32_beside_masters_and_zeroed_by_the_step() -> None:
    model = make_model(torch.bfloat16)
    optimizer = FlatAdamW(model, lr=1e-2, gradients="flat")
    weight = model[0].weight
    address = weight.grad.data_ptr()
    expected = torch.zeros(weight.shape)
    for micro in range(3):
        other = make_model(torch.bfloat16)
        backward(other, 0, micro)
        expected += other[0].weight.grad.float()
        backward(model, 0, micro)
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, expected)
    optimizer.step()
    assert weight.grad.data_ptr() == address
    assert not weight.grad.any()
    backward(model, 1)
    optimizer.zero_grad()
    assert not weight.grad.any()
    # Somebody else's way of zeroing, and of making a gradient.
    model.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert weight.grad.data_ptr() == address


def test_stochastic_rounding_differs_by_seed_only() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = make_model(torch.bfloat16)
        train(model, FlatAdamW(model, lr=1e-3, stochastic_rounding=True, seed=seed))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_closure_is_called_with_gradients_on() -> None:
    model = make_model()
    optimizer = FlatAdamW(model)

    def closure() -> float:
        assert torch.is_grad_enabled()
        return backward(model, 0)

    assert optimizer.step(closure) == pytest.approx(backward(make_model(), 0))


def moved(model: nn.Sequential) -> None:
    model.to(torch.float64)


def assigned(model: nn.Sequential) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [moved, assigned])
def test_parameters_that_left_are_an_error(change: Callable[[nn.Sequential], None]) -> None:
    model = make_model()
    optimizer = FlatAdamW(list(model.parameters()))
    change(model)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    if change is assigned:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].data = torch.zeros(17, 13)
    with pytest.raises(TrainingError, match=r"has left its flat bucket .* after such"):
        optimizer.step()


def test_frozen_parameters_stay_where_they_are_and_must_stay_frozen() -> None:
    model = make_model()
    model[0].requires_grad_(requires_grad=False)
    address = model[0].weight.data_ptr()
    optimizer = FlatAdamW(model)
    assert model[0].weight.data_ptr() == address
    train(model, optimizer, range(2))
    model[0].requires_grad_(requires_grad=True)
    backward(model, 2)
    with pytest.raises(TrainingError, match="was frozen when the optimizer was made"):
        optimizer.step()


def test_states_of_another_model_are_refused() -> None:
    model = make_model()
    optimizer = FlatAdamW(model)
    other = FlatAdamW(list(model.parameters())[:2])
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, this optimizer of \[5"):
        optimizer.load_state_dict(other.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"exp_avg has shape \(3,\), its parameter \(17, 13"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(5.0)
    with pytest.raises(CheckpointError, match=r"step counts \[0.0, 5.0\]"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0, expected 0 or more"),
        ({"lr": None}, "lr = None, expected 0 or more"),
        ({"lr": float("inf")}, "lr = inf, expected 0 or more"),
        ({"betas": 0.9}, "betas = 0.9, expected two numbers in "),
        ({"betas": (0.9, 0.9, 0.9)}, "betas = .*, expected two numbers in "),
        ({"max_norm": "1"}, "max_norm = 1, expected more than 0, or None"),
        ({"betas": (0.9, 1.0)}, "betas = "),
        ({"eps": 0.0}, "eps = 0.0, expected more than 0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"max_norm": 0.0}, "max_norm = 0.0, expected more than 0, or None"),
        ({"moments": torch.float16}, "moments = torch.float16, expected fp32 or bf16"),
        ({"gradients": "none"}, "gradients = none, expected separate or flat"),
        ({"masters": True, "stochastic_rounding": True}, "exclude each other; choose one"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FlatAdamW(make_model(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0, expected 0 or more"),
        ({"betas": (1.0, 0.9)}, "betas = .*, expected two numbers"),
        ({"weight_decay": float("nan")}, "weight_decay = nan, expected 0 or more"),
    ],
)
def test_errors_name_the_argument_of_a_group(options: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        FlatAdamW([{"params": list(model.parameters()), **options}])
    optimizer = FlatAdamW(model[0])
    with pytest.raises(ConfigError, match=message):
        optimizer.add_param_group({"params": list(model[3].parameters()), **options})
    assert len(optimizer.param_groups) == 1


def test_flat_gradients_refuse_to_move_what_is_frozen_later() -> None:
    weights = []
    for gradients in ("separate", "flat"):
        model = make_model()
        optimizer = FlatAdamW(model, lr=1e-2, gradients=gradients)
        train(model, optimizer, range(2))
        model[0].requires_grad_(requires_grad=False)
        weights.append(model[0].weight.detach().clone())
        backward(model, 2)
        if gradients == "separate":
            optimizer.step()
        else:
            with pytest.raises(TrainingError, match=r"shape \(17, 13\) was frozen after the opt"):
                optimizer.step()
        assert torch.equal(model[0].weight, weights[-1])


def test_backward_through_a_step_is_an_error() -> None:
    # As with torch.optim: without it the gradients would silently be of other weights.
    model = make_model()
    optimizer = FlatAdamW(model)
    loss = model(torch.ones(2, 13)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied_without_its_buckets(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="is not pickled or copied; save its state_dict"):
        copied(FlatAdamW(make_model()))


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(7, 4, sparse=True)
    optimizer = FlatAdamW(embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TrainingError, match=r"sparse gradient; make its nn\.Embedding with"):
        optimizer.step()


def test_states_of_other_optimizers_are_refused_and_change_nothing() -> None:
    model = make_model()
    optimizer = FlatAdamW(model, lr=1e-2)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    lacking = copy.deepcopy(before)
    lacking["param_groups"][0]["lr"] = 7.0
    del lacking["state"][4]["exp_avg_sq"]
    other = copy.deepcopy(before)
    other["param_groups"][0]["amsgrad"] = True
    wrong: list[tuple[Any, str]] = [
        (None, "is a NoneType without state and param_groups"),
        ({}, "is a dict without state and param_groups"),
        (lacking, r"exp_avg_sq is missing for a parameter of shape \(5, 17\)"),
        (other, "of an optimizer with amsgrad"),
    ]
    for state, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


def test_expert_weights_lie_side_by_side_where_asked_for() -> None:
    experts, dim, hidden = 4, 16, 8

    def make() -> list[nn.Parameter]:
        torch.manual_seed(2)
        sizes = (3, 5), (experts, 2 * hidden, dim), (experts, dim, hidden)
        return [nn.Parameter(torch.randn(size)) for size in sizes]

    (first, w13, w2), others = make(), make()
    optimizer = FlatAdamW([first, w13, w2], lr=1e-2, adjacent=[(w13, w2)], max_norm=1.0)
    stock = FlatAdamW(others, lr=1e-2, max_norm=1.0)
    assert w13.stride() == (3 * hidden * dim, dim, 1)
    assert w2[0].data_ptr() == w13[0].data_ptr() + 4 * 2 * hidden * dim
    assert w2[1].data_ptr() - w13[1].data_ptr() == w2[0].data_ptr() - w13[0].data_ptr()
    for _ in range(3):
        for param, other in zip((first, w13, w2), others, strict=True):
            param.grad = torch.randn(param.shape)
            other.grad = param.grad.clone()
        optimizer.step()
        stock.step()
    for param, other in zip((first, w13, w2), others, strict=True):
        assert torch.equal(param, other)
    with pytest.raises(ConfigError, match=r"shapes \(4, 2\), \(3, 2\) have no common first dim"):
        FlatAdamW(
            pair := [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3, 2))],
            adjacent=[tuple(pair)],
        )
    with pytest.raises(ConfigError, match="only some are trained in this group"):
        FlatAdamW(others[:2], adjacent=[(others[1], others[2])])


def test_loading_its_own_state_changes_nothing() -> None:
    # What accelerate does when it wraps an optimizer.
    model, other = make_model(torch.bfloat16), make_model(torch.bfloat16)
    pair = [FlatAdamW(m, lr=1e-2) for m in (model, other)]
    for part in (range(2), range(2, 4)):
        pair[0].load_state_dict(pair[0].state_dict())
        assert train(model, pair[0], part) == train(other, pair[1], part)
    assert_equal_weights(model, other)


def shapes(numbers: Iterator[int]) -> torch.Tensor:
    return torch.randn(next(numbers), next(numbers))


def test_large_and_odd_parameters_fill_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.parallel.flat_storage.BUCKET_ELEMENTS", 500)
    numbers = itertools.cycle([7, 11, 63, 3])
    params = [nn.Parameter(shapes(numbers)) for _ in range(9)]
    params += [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 4))]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, stock = FlatAdamW(params, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, fused=True)
    storages = {p.untyped_storage().data_ptr() for p in params if p.numel()}
    assert len(storages) > 2
    for _ in range(2):
        for param, other in zip(params, others, strict=True):
            param.grad = torch.randn(param.shape)
            other.grad = param.grad.clone()
        optimizer.step()
        stock.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
