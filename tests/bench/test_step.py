"""Whole training steps in turns: order, batches, parking, figures, rows."""

import itertools
import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.bench import step as bench
from slipstream.bench import step_graph
from slipstream.bench.ops_case import Missing
from slipstream.bench.results import Row
from slipstream.bench.step import StepRequest, bench_step
from slipstream.bench.step_arms import ARMS, Arm, Setting, make_arm, select_arms
from slipstream.bench.step_clock import Clock, StepTimes
from slipstream.bench.step_figures import figures
from slipstream.bench.step_model import (
    build,
    learnable_tokens,
    random_tokens,
    step_model,
)
from slipstream.bench.step_park import Parking, tensors_in, who_leaves
from slipstream.errors import ConfigError
from slipstream.models.flops import train_flops_per_token
from slipstream.parallel.flat import FlatAdamW
from tests.train.recording import Tape

CPU = torch.device("cpu")
TINY = step_model("tiny", layers=1, batch=2, seq_len=16)


class Small(nn.Module):
    """Stands in for a language model; ``off`` shifts its loss."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.off = off
        self.seen: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.seen.append(input_ids)
        return SimpleNamespace(loss=self.weight.square().sum() + self.off)


@pytest.fixture
def small_arms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``make_arm`` makes small models; what is trained is noted in order."""
    order: list[str] = []

    def make(name: str, setting: Setting) -> Arm:
        if name == "stock-liger":
            raise Missing("it is not here")
        if name == "stock-cudnn":
            raise RuntimeError("no kernel for\nthis")
        model = Small({"slipstream": 1.0, "slipstream-cache": float("nan")}.get(name, 0.0))
        model.register_forward_pre_hook(lambda *_: order.append(name))
        return Arm(name=name, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))

    monkeypatch.setattr(bench, "make_arm", make)
    return order


def measure(arms: str, steps: int = 2, rounds: int = 2) -> list[Row]:
    request = StepRequest(model=TINY, arms=arms.split(","), device=CPU, steps=steps, rounds=rounds)
    rows = list(bench_step(request, lambda text: None))
    return [json.loads(json.dumps(row)) for row in rows]


def test_blocks_rotate_and_every_arm_takes_as_many_steps(small_arms: list[str]) -> None:
    rows = measure("stock,stock-cudnn-liger,slipstream")
    runs = [(name, len(list(group))) for name, group in itertools.groupby(small_arms)]
    a, b, c = "stock", "stock-cudnn-liger", "slipstream"
    block = bench.SETTLE + 2 + bench.HOST_STEPS
    # The warm-up of the last arm, then blocks; a block follows another of the same arm nowhere.
    assert runs == [
        *((name, bench.WARM_UP) for name in (a, b, c)),
        *((name, block) for name in (a, b, c)),
        *((name, block) for name in (b, c, a)),
    ]
    assert {row["compared_steps"] for row in rows} == {bench.WARM_UP + 2 * block}


def test_arms_that_are_absent_fail_or_are_wrong_have_no_figures(small_arms: list[str]) -> None:
    rows = measure("stock,stock-liger,stock-cudnn,slipstream,slipstream-cache,stock-cudnn-liger")
    assert [(row["status"], row.get("reason")) for row in rows] == [
        ("ok", None),
        ("absent", "it is not here"),
        ("failed", "RuntimeError: no kernel for this"),
        ("wrong", "first loss 5.00000, stock has 4.00000"),
        ("wrong", "a loss is not finite"),
        ("ok", None),
    ]
    for row in rows:
        assert ("step_ms" in row) == (row["status"] == "ok")
    assert rows[0]["n"] == 4
    assert rows[0]["max_loss_difference"] == rows[5]["max_loss_difference"] == 0.0


def test_an_arm_that_fails_between_others_leaves_them_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(Small):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            if len(self.seen) == bench.WARM_UP + 1:
                raise torch.OutOfMemoryError("no room")
            return super().forward(input_ids, labels)

    def make(name: str, setting: Setting) -> Arm:
        model = Failing() if name == "stock" else Small()
        return Arm(name=name, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))

    monkeypatch.setattr(bench, "make_arm", make)
    rows = measure("stock,slipstream,slipstream-cache")
    assert [row["status"] for row in rows] == ["failed", "ok", "ok"]
    assert rows[0]["reason"] == "OutOfMemoryError: no room"
    assert {row["compared_to"] for row in rows[1:]} == {"slipstream"}
    assert rows[2]["n"] == 4


def test_the_planned_arm_needs_the_peak_of_the_unplanned_one(small_arms: list[str]) -> None:
    (row,) = measure("slipstream-auto")
    assert row["status"] == "absent"
    assert "name that arm before it" in row["reason"]


def test_stock_and_optimized_arms_start_and_stay_alike() -> None:
    with torch.compiler.set_stance("force_eager"):
        stock, ours, cache = measure("stock,slipstream,slipstream-cache", steps=1, rounds=1)
    assert stock["status"] == ours["status"] == cache["status"] == "ok", (ours, cache)
    assert ours["max_loss_difference"] < 5e-3
    assert cache["max_loss_difference"] < 5e-3
    assert ours["optimized"]["moe"] == 1
    assert "moe" not in cache["optimized"]
    used = {name.partition("=")[0] for name in cache["implementations"]}
    assert {"norm", "linear_cross_entropy", "adamw"} <= used
    assert not {name for name in used if name.startswith("moe")}
    assert stock["implementations"] == []
    assert ours["time_over_first"]["min"] > 0
    assert "time_over_first" not in stock


def test_equal_seeds_give_equal_weights_and_batches() -> None:
    one, same, other = (build(TINY, CPU, seed=seed) for seed in (0, 0, 1))
    assert next(one.parameters()).dtype == torch.bfloat16
    pairs = zip(one.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert torch.equal(random_tokens(TINY, 3, CPU), random_tokens(TINY, 3, CPU))
    assert not torch.equal(random_tokens(TINY, 3, CPU), random_tokens(TINY, 4, CPU))


def test_a_chain_can_be_learned() -> None:
    tokens = learnable_tokens(TINY, 200)
    assert tokens.shape == (200, 2, 16)
    assert torch.equal(tokens, learnable_tokens(TINY, 200))
    pairs = torch.stack((tokens[..., :-1].flatten(), tokens[..., 1:].flatten()), dim=1)
    followers = [pairs[pairs[:, 0] == t, 1].bincount(minlength=128) for t in range(128)]
    top = sum(int(counts.topk(4)[0].sum()) for counts in followers)
    # Nine in ten follow the chain, and few of the others land on one of its four by chance.
    assert 0.88 < top / len(pairs) < 0.97


def test_an_arm_comes_back_as_it_left() -> None:
    model = nn.Linear(8, 4).to(torch.bfloat16)
    arm = Arm(name="x", model=model, optimizer=torch.optim.AdamW(model.parameters(), fused=True))

    def train() -> None:
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        arm.update()

    train()
    tensors = [*model.parameters(), *tensors_in(arm.optimizer)]
    before = [tensor.clone() for tensor in tensors]
    parking = arm.parking()
    # Weights and two moments of 36 numbers in 16 bits, and two fp32 step counts.
    assert parking.nbytes == 3 * 2 * 36 + 2 * 4
    parking.leave()
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    parking.leave()
    parking.come_back()
    assert parking.turns == 1
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    train()
    assert not torch.equal(model.weight, before[0])


def test_memory_of_flat_buckets_counts_once_and_stays() -> None:
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = FlatAdamW(model, masters=False, moments=torch.bfloat16)
    parking = Arm(name="x", model=model, optimizer=optimizer, movable=False).parking()
    assert not parking.movable
    assert 3 * 2 * 65 * 64 <= parking.nbytes < 1.1 * 3 * 2 * 65 * 64 + 1024


def parking_of(nbytes: int, movable: bool = True) -> Parking:
    return Parking([torch.empty(nbytes, dtype=torch.uint8)], movable=movable)


def test_only_as_many_arms_leave_as_must() -> None:
    parkings = {name: parking_of(100) for name in "abc"}
    assert who_leaves("a", parkings, working_bytes=50, total_bytes=350) == []
    assert who_leaves("a", parkings, working_bytes=51, total_bytes=350) == ["b"]
    assert who_leaves("new", parkings, working_bytes=200, total_bytes=300) == ["a", "b"]
    parkings["b"].leave()
    assert who_leaves("a", parkings, working_bytes=150, total_bytes=349) == ["c"]
    parkings["fixed"] = parking_of(100, movable=False)
    assert who_leaves("c", parkings, working_bytes=250, total_bytes=349) == ["a"]


def test_steps_are_timed_end_to_end() -> None:
    clock = Clock(CPU)
    marks = [[0.0, 1.0, 3.0, 3.5], [4.0, 5.0, 7.0, 8.0]]
    clock._marks = [(found, 2.0) for found in marks]
    first, second = clock.read()
    assert first == StepTimes(
        step_ms=3500.0, forward_ms=1e3, backward_ms=2e3, optimizer_ms=500.0, host_ms=2.0
    )
    # The gap before it belongs to the second step.
    assert second.step_ms == 4500.0
    assert second.optimizer_ms == 1000.0
    assert clock.read() == []


def times(*ms: float) -> list[StepTimes]:
    return [
        StepTimes(step_ms=m, forward_ms=m / 4, backward_ms=m / 2, optimizer_ms=m / 4, host_ms=1.0)
        for m in ms
    ]


def test_figures_of_known_times() -> None:
    blocks, reference = [times(10, 12, 11), times(20, 21, 22)], [times(22, 22), times(28, 28)]
    row = figures(TINY, blocks, [3.0, 5.0], reference, product_flops_per_s=1e9, device=CPU)
    assert row["n"] == 6
    assert row["step_ms"]["median"] == 16.0
    assert row["backward_ms"]["median"] == 8.0
    assert row["host_ms"]["median"] == 4.0
    assert row["tok_per_s"] == 32 / 16e-3
    assert row["block_ms"] == [11, 21]
    assert row["time_over_first"] == {"median": 0.625, "min": 0.5, "max": 0.75}
    flops = 32 * train_flops_per_token(TINY.config, 16)
    assert row["mfu_of_measured"] == pytest.approx(flops / 16e-3 / 1e9, abs=1e-4)
    assert "mfu_of_nominal" not in row


def test_the_default_is_olmoe_with_eight_layers() -> None:
    model = step_model(None, layers=None, batch=4, seq_len=4096)
    row = model.row()
    wanted = {"layers": 8, "width": 2048, "hidden": 1024, "experts": 64, "top_k": 8}
    assert {name: row[name] for name in wanted} == wanted
    assert row["vocab_size"] == 50304
    assert model.num_params == pytest.approx(3.56e9, rel=0.01)
    assert step_model(None, layers=2, batch=1, seq_len=8).config.num_layers == 2


def test_a_recipe_gives_the_shape(tmp_path: Any) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\npreset = "qwen3-30b-a3b"\nnum_layers = 3\n')
    model = step_model(str(recipe), layers=None, batch=1, seq_len=64)
    assert (model.config.num_layers, model.config.kv_heads, model.row()["experts"]) == (3, 4, 128)
    recipe.write_text('[model]\npreset = "qwen3-8b"\n')
    with pytest.raises(ConfigError, match="every layer of the measured model has experts"):
        step_model(str(recipe), layers=None, batch=1, seq_len=64)
    with pytest.raises(ConfigError, match=r"expected a \.toml recipe or one of small, tiny"):
        step_model("olmoe", layers=None, batch=1, seq_len=64)


def test_arms_by_name() -> None:
    assert select_arms("slipstream, stock,slipstream") == ["slipstream", "stock"]
    for text, wrong in (("stok", "stok"), ("", "")):
        with pytest.raises(ConfigError, match=rf"--arms {wrong}: there are stock, "):
            select_arms(text)
    tokens = random_tokens(TINY, 0, CPU)
    setting = Setting(model=TINY, device=CPU, seed=0, lr=1e-3, tokens_BL=tokens)
    with pytest.raises(Missing, match=r"liger_kernel is not installed|need a CUDA device"):
        make_arm("stock-liger", setting)
    assert "slipstream-auto" in ARMS


def test_the_graph_arm_trains_what_the_eager_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(
        model=TINY, device=CPU, seed=0, lr=1e-2, tokens_BL=random_tokens(TINY, 0, CPU)
    )
    with pytest.raises(Missing, match="needs a CUDA device"):
        make_arm("slipstream-graph", setting)
    plain, arm = make_arm("slipstream", setting), make_arm("slipstream", setting)
    tape = Tape(arm.model)
    monkeypatch.setattr(step_graph, "CudaRecorder", lambda device: tape)
    arm.graph = step_graph.ModelGraph(arm.model, torch.device("cuda"))
    # What would wait for the device.
    masks = import_module("transformers.masking_utils")
    asked = []
    monkeypatch.setattr(masks, "find_packed_sequence_indices", asked.append)
    losses: list[list[float]] = []
    for trained in (plain, arm):
        clock = Clock(CPU)
        steps = [clock.step(trained, random_tokens(TINY, i, CPU)) for i in range(3)]
        losses.append([float(loss) for loss in steps])
    assert losses[0] == losses[1]
    assert len(asked) == 3, "only the eager model asks"
    for one, other in zip(plain.model.parameters(), arm.model.parameters(), strict=True):
        assert torch.equal(one, other)
    gradients = sum(param.nbytes for param in arm.model.parameters())
    assert arm.parking().nbytes >= plain.parking().nbytes + gradients
