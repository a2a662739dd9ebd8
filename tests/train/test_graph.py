"""Recorded passes: what eager steps train, to the bit; what cannot be recorded is refused."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.data import Batch
from slipstream.errors import ConfigError, TrainingError
from slipstream.models import ModelConfig, MoEConfig, Transformer
from slipstream.models.config import BalanceConfig
from slipstream.parallel import Ranks
from slipstream.train.config import OptimConfig, RunConfig, TrainConfig
from slipstream.train.graph import GraphedPasses, check_graph, check_sites, recorder_for
from slipstream.train.guard import first_bad_place
from slipstream.train.optimizer import AdamW
from slipstream.train.phases import GRAPH_PHASES, PhaseTimer
from slipstream.train.step import StepResult, TrainStep
from tests.train.recording import Tape
from tests.train.runs import arguments, records, slipstream

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), control=None)
STEPS = 4
MODELS = {
    "dense": {"tie_embeddings": True},
    "moe": {
        "moe": MoEConfig(
            num_experts=4,
            top_k=2,
            d_ff=24,
            shared_d_ff=16,
            aux_loss=0.01,
            z_loss=1e-3,
            expert_bias=True,
            balance=BalanceConfig(threshold=1.25, window=2, ramp=2),
        )
    },
}


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 40}
    model = Transformer(ModelConfig.model_validate(shape | MODELS[kind]), z_loss=1e-3)
    model.compute_dtype = dtype
    return model


def make_batch(step: int, documents: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (4, 17), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[step % 4, : 3 + step] = -100
    document = (torch.arange(16) // (5 + step)).int().expand(4, 16).contiguous()
    return Batch(
        tokens_BL=tokens[:, :-1].contiguous(),
        targets_BL=targets,
        document_BL=document if documents else None,
    )


def make_step(
    model: Transformer,
    tape: Tape | None,
    micro_batch: int = 0,
    storage: str = "flat",
) -> TrainStep:
    optimizer = AdamW(
        model,
        OptimConfig.model_validate({"storage": storage}),
        weights=model.compute_dtype or torch.float32,
        accumulate=0 < micro_batch < 4,
    )
    timer = PhaseTimer(ALONE.device, GRAPH_PHASES)
    config = TrainConfig(micro_batch=micro_batch)
    return TrainStep(model, model, optimizer, config, ALONE, timer, tape)


def run(step: TrainStep, documents: bool = False) -> list[StepResult]:
    results = []
    for number in range(STEPS):
        results.append(step.run(make_batch(number, documents), lr=1e-2))
        step.optimizer.zero_grad()
    return results


def assert_same(one: TrainStep, other: TrainStep) -> None:
    theirs = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    states = other.optimizer.state
    for name, state in one.optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(value, states[name][key]), (name, key)


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("storage", ["flat", "separate"])
@pytest.mark.parametrize("micro_batch", [0, 2, 1], ids=["alone", "pair", "four"])
@pytest.mark.parametrize("kind", MODELS)
def test_replayed_steps_are_eager_ones_to_the_bit(
    kind: str, micro_batch: int, storage: str, documents: bool
) -> None:
    eager = make_step(make_model(kind), None, micro_batch, storage)
    model = make_model(kind)
    tape = Tape(model)
    graphed = make_step(model, tape, micro_batch, storage)
    expected = run(eager, documents)
    assert run(graphed, documents) == expected
    assert_same(graphed, eager)
    assert not any(result.skipped for result in expected)
    count = 4 // (micro_batch or 4)
    assert tape.recorded == min(2, count)
    assert tape.replayed == STEPS * count


def test_gradients_of_short_weights_are_summed_in_fp32_as_without_a_graph() -> None:
    eager = make_step(make_model("moe", torch.bfloat16), None, 2)
    model = make_model("moe", torch.bfloat16)
    graphed = make_step(model, Tape(model), 2)
    assert run(graphed) == run(eager)
    assert_same(graphed, eager)


def test_gradients_stay_where_they_are_from_step_to_step() -> None:
    model = make_model("moe")
    step = make_step(model, Tape(model), 2)
    seen = []
    for number in range(3):
        step.run(make_batch(number), lr=1e-2)
        seen.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        step.optimizer.zero_grad()
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == len(list(model.parameters()))


def test_recording_leaves_no_trace() -> None:
    model = make_model("moe")
    model.train()
    with torch.no_grad():
        for moe in model.moe_layers().values():
            moe.demand_E.fill_(7.0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    seen = {}

    def passes(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets).loss
        loss.objective.backward()
        return loss.nll

    class Watching(Tape):
        def record(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable]:
            output, _ = super().record(function)
            return output, lambda: seen.update({n: b.clone() for n, b in model.named_buffers()})

    graphed = GraphedPasses(model, passes, Watching(model), accumulate=True)
    batch = make_batch(0)
    graphed.load((batch.tokens_BL, batch.targets_BL))
    graphed.run(first=True)
    assert seen.keys() == before.keys()
    for name, buffer in seen.items():
        assert torch.equal(buffer, before[name]), name
    assert torch.equal(torch.get_rng_state(), random)


def test_a_bad_step_is_skipped_and_named_and_the_next_one_goes_on() -> None:
    model = make_model("moe")
    step = make_step(model, Tape(model), 2)
    step.run(make_batch(0), lr=1e-2)
    step.optimizer.zero_grad()
    weight = model.layers[1].attention.wo.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.inf
    assert step.run(make_batch(1), lr=1e-2).skipped
    place = first_bad_place(model, make_batch(1), 2, ALONE.device)
    assert str(place) == "weights of layers.1.attention.wo.weight"
    step.optimizer.zero_grad()
    with torch.no_grad():
        weight.copy_(good)
    result = step.run(make_batch(2), lr=1e-2)
    assert not result.skipped
    assert math.isfinite(result.loss)


def test_phases_of_a_graph() -> None:
    model = make_model("dense")
    step = make_step(model, Tape(model))
    step.run(make_batch(0), lr=1e-2)
    spent = step.timer.take()
    assert set(spent) == {"data", "graph", "optimizer", "host"}
    assert spent["graph"] > 0
    assert spent["host"] >= spent["graph"] + spent["optimizer"]


def test_a_failed_recording_says_what_broke_first_and_what_to_do() -> None:
    class Broken(Tape):
        def record(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable]:
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            finally:
                raise RuntimeError("capture was invalidated")

    model = make_model("dense")
    step = make_step(model, Broken(model))
    with pytest.raises(TrainingError) as found:
        step.run(make_batch(0), lr=1e-2)
    assert str(found.value) == (
        "forward and backward cannot be recorded as a CUDA graph: RuntimeError: operation not "
        "permitted when stream is capturing; set train.cuda_graph=false"
    )


def test_a_cpu_is_refused_before_anything_is_written(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    extra = ("train.cuda_graph=true", "train.device=cpu")
    done = slipstream(*arguments("dense", corpus, run_dir, *extra))
    assert done.returncode == 2
    assert "train.cuda_graph = true needs a CUDA device, this run is on cpu" in done.stderr
    assert "set train.cuda_graph=false" in done.stderr
    assert not run_dir.exists()


def config(**train: object) -> RunConfig:
    return RunConfig.model_validate({"train": {"cuda_graph": True, **train}})


def test_several_ranks_are_refused() -> None:
    two = Ranks(rank=0, world=2, device=torch.device("cuda"), control=None)
    with pytest.raises(ConfigError, match=r"is for one rank, this run has 2,.*cuda_graph=false"):
        check_graph(config(), two)
    check_graph(config(), Ranks(rank=0, world=1, device=torch.device("cuda"), control=None))
    check_graph(config(cuda_graph=False), two)


def test_offload_is_refused() -> None:
    model = make_model("dense")
    check_sites(config(), model)
    for layer in model.layers:
        layer.recompute = "offload"
    with pytest.raises(ConfigError, match=r"chose for layers\.0 and 1 more; raise"):
        check_sites(config(), model)
    check_sites(config(cuda_graph=False), model)


def test_without_the_switch_nothing_is_recorded() -> None:
    assert recorder_for(config(cuda_graph=False), ALONE) is None


def test_every_run_says_how_long_the_host_took(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = slipstream(*arguments("moe", corpus, run_dir, "train.steps=2", "train.device=cpu"))
    assert done.returncode == 0, done.stderr
    assert all("time" not in record for record in records(run_dir))
    lines = (run_dir / "metrics.jsonl").read_text()
    assert lines.count('"host_ms"') == lines.count('"forward_ms"') == 2
