"""Flat storage trains what separate tensors train, to the bit."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from slipstream.data import Batch
from slipstream.models import ModelConfig, MoEConfig, Transformer
from slipstream.parallel import Ranks
from slipstream.train import load_model
from slipstream.train.checkpoint import find
from slipstream.train.config import OptimConfig, TrainConfig
from slipstream.train.optimizer import AdamW
from slipstream.train.phases import PhaseTimer
from slipstream.train.step import StepResult, TrainStep
from tests.train.runs import arguments, records, slipstream, torchrun

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), control=None)
STEPS = 6
MODELS = {
    "dense": {"attention_bias": True, "mlp_bias": True, "qk_norm": "head"},
    "tied": {"tie_embeddings": True, "norm": "layer", "norm_bias": True, "activation": "gelu"},
    "moe": {
        "moe": MoEConfig(
            num_experts=4, top_k=2, d_ff=24, shared_d_ff=16, aux_loss=0.01, z_loss=1e-3
        )
    },
    "frozen": {},
}


def make_model(kind: str, dtype: torch.dtype) -> Transformer:
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 40}
    model = Transformer(ModelConfig.model_validate(shape | MODELS[kind]), z_loss=1e-3)
    model.compute_dtype = dtype
    if kind == "frozen":
        model.embed.requires_grad_(requires_grad=False)
        model.layers[0].requires_grad_(requires_grad=False)
    return model


def make_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (4, 17), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -100
    return Batch(tokens_BL=tokens[:, :-1].contiguous(), targets_BL=targets, document_BL=None)


def train(
    kind: str, dtype: torch.dtype, micro_batch: int, storage: str, recompute: str = "keep"
) -> tuple[list[StepResult], Transformer, AdamW]:
    model = make_model(kind, dtype)
    sites = [m for m in model.modules() if recompute in getattr(m, "recompute_actions", ())]
    assert sites, f"nothing can {recompute}"
    for site in sites:
        site.recompute = recompute
    optimizer = AdamW(
        model,
        OptimConfig(clip=0.5, storage=storage),
        weights=dtype,
        accumulate=micro_batch > 0,
    )
    config = TrainConfig(micro_batch=micro_batch)
    step = TrainStep(model, model, optimizer, config, ALONE, PhaseTimer(ALONE.device))
    results = []
    for i in range(STEPS):
        results.append(step.run(make_batch(i), lr=1e-2))
        optimizer.zero_grad()
    return results, model, optimizer


def assert_same(left: tuple, right: tuple) -> None:
    (results, model, optimizer), (expected, other, reference) = left, right
    assert results == expected
    weights = optimizer.exact(model.state_dict())
    for name, value in other.state_dict().items():
        assert weights[name].dtype == value.dtype, name
        assert torch.equal(weights[name], value), name
    assert optimizer.state.keys() == reference.state.keys()
    for name, state in reference.state.items():
        for key, value in state.items():
            assert torch.equal(optimizer.state[name][key], value), (name, key)


@pytest.mark.parametrize("micro_batch", [0, 2], ids=["whole", "micro"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_flat_and_separate_train_the_same_bits(
    kind: str, dtype: torch.dtype, micro_batch: int
) -> None:
    flat, separate = (train(kind, dtype, micro_batch, s) for s in ("flat", "separate"))
    assert_same(flat, separate)
    losses = {result.loss for result in flat[0]}
    assert all(map(math.isfinite, losses))
    assert len(losses) == STEPS


@pytest.mark.parametrize(
    ("kind", "action"),
    [("dense", "reemit"), ("dense", "recompute"), ("moe", "experts"), ("moe", "full")],
)
def test_it_is_the_same_whatever_backward_keeps(kind: str, action: str) -> None:
    assert_same(*(train(kind, torch.bfloat16, 0, s, action) for s in ("flat", "separate")))


def test_matrices_that_are_cast_anyway_are_kept_short_and_nothing_else() -> None:
    _, model, _ = train("moe", torch.bfloat16, 0, "flat")
    short = {n.split(".", 2)[-1] for n, p in model.named_parameters() if p.dtype != torch.float32}
    assert short == {
        *(f"attention.{name}.weight" for name in ("wqkv", "wo")),
        *("moe.w13", "moe.w2", "moe.shared.w13.weight", "moe.shared.w2.weight"),
    }
    assert model.head is not None
    assert model.head.weight.dtype == model.embed.weight.dtype == torch.float32


def test_a_skipped_step_leaves_weights_and_masters_and_the_next_one_goes_on() -> None:
    _, model, optimizer = train("dense", torch.bfloat16, 0, "flat")
    before = {name: value.clone() for name, value in optimizer.exact(model.state_dict()).items()}
    model(make_batch(9).tokens_BL, make_batch(9).targets_BL).loss.objective.backward()
    update = optimizer.step(1e-2, torch.tensor(False))
    assert update.skipped
    for name, value in optimizer.exact(model.state_dict()).items():
        assert torch.equal(value, before[name]), name
    assert not optimizer.step(1e-2, torch.tensor(True)).skipped
    changed = optimizer.exact(model.state_dict())
    assert not torch.equal(changed["layers.0.mlp.w2.weight"], before["layers.0.mlp.w2.weight"])


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run).state_dict()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_run_and_its_checkpoints_are_the_same_and_resume_each_other(
    dtype: str, corpus: Path, tmp_path: Path
) -> None:
    runs = {}
    for storage in ("flat", "separate"):
        runs[storage] = tmp_path / storage
        settings = (f"train.dtype={dtype}", "train.micro_batch=4", f"optim.storage={storage}")
        done = slipstream(*arguments("moe", corpus, runs[storage], *settings))
        assert done.returncode == 0, done.stderr
    assert records(runs["flat"]) == records(runs["separate"])
    sizes = [
        sum(file.stat().st_size for file in find(run / "checkpoints")[-1].path.iterdir())
        for run in runs.values()
    ]
    # Views of a large tensor could be written as the whole of it each.
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    # Begun flat, ended separate, and the other way round.
    for first, then in (("flat", "separate"), ("separate", "flat")):
        crossed = tmp_path / f"{first}-{then}"
        shutil.copytree(runs[first], crossed)
        last = find(crossed / "checkpoints")[-1].path
        last.rename(last.with_name(f".{last.name}.partial"))
        settings = (f"train.dtype={dtype}", "train.micro_batch=4", f"optim.storage={then}")
        done = slipstream(*arguments("moe", corpus, crossed, *settings), "--resume")
        assert done.returncode == 0, done.stderr
        assert records(crossed) == records(runs["flat"])
        expected = weights_of(runs["flat"])
        for name, value in weights_of(crossed).items():
            assert torch.equal(value, expected[name]), name


def test_two_ranks_train_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    runs = []
    for storage in ("flat", "separate"):
        run = tmp_path / storage
        settings = ("train.micro_batch=2", "train.dtype=bf16", f"optim.storage={storage}")
        done = torchrun(2, *arguments("moe", corpus, run, *settings))
        assert done.returncode == 0, done.stderr
        runs.append(run)
    assert records(runs[0]) == records(runs[1])
    expected = weights_of(runs[1])
    for name, value in weights_of(runs[0]).items():
        assert torch.equal(value, expected[name]), name
