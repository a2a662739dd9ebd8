"""A model keeps a bounded number of position tables and they are those of every length."""

import weakref
from typing import Any

import pytest
import torch

from slipstream.models import ModelConfig, Transformer, transformer
from slipstream.models.generate import generate
from slipstream.ops import rope_tables

ORIGINAL = 8
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 4.0, "original_len": ORIGINAL},
    "yarn": {"factor": 4.0, "original_len": ORIGINAL},
    "dynamic": {"factor": 4.0, "original_len": ORIGINAL},
    "longrope": {
        "factor": 4.0,
        "original_len": ORIGINAL,
        "long_factor": (1.5, 2.5),
        "short_factor": (1.0, 1.25),
    },
}
LENGTHS = [1, 5, 8, 3, 9, 20, 12, 32, 9, 8, 7, 31, 32, 1]


def build(scaling: str) -> Transformer:
    torch.manual_seed(0)
    values = {"vocab_size": 37, "num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 12}
    rope = {"scaling": scaling, **SCALINGS[scaling]}
    config = ModelConfig.model_validate({**values, "max_seq_len": 32, "rope": rope})
    return Transformer(config).eval()


def kept_rows(model: Transformer) -> int:
    return sum(len(cos) for cos, _ in model._tables.values())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_are_those_of_the_length_in_any_order(scaling: str) -> None:
    model = build(scaling)
    for length in LENGTHS:
        expected = rope_tables(model.config.rope_spec(), length)
        for table, fresh in zip(model._rope(length, torch.device("cpu")), expected, strict=True):
            assert torch.equal(table, fresh), length
    assert len(model._tables) <= 2
    assert kept_rows(model) <= ORIGINAL + 32


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_do_not_depend_on_the_lengths_seen_before(scaling: str) -> None:
    used, tokens = build(scaling), torch.randint(0, 37, (2, 32))
    with torch.no_grad():
        for length in LENGTHS:
            fresh = build(scaling)
            assert torch.equal(used(tokens[:, :length]).logits, fresh(tokens[:, :length]).logits), (
                length
            )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_generating_keeps_no_table_per_token(scaling: str) -> None:
    model = build(scaling)
    assert len(generate(model, [1], 60)) == 60
    assert len(model._tables) <= 2
    assert kept_rows(model) <= ORIGINAL + 32


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_recorded_graph_keeps_the_tables_it_reads(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, device = build(scaling), torch.device("cpu")
    monkeypatch.setattr(transformer, "_recording", lambda _: True)
    read = [weakref.ref(t.untyped_storage()) for t in model._rope(5, device)]
    model._rope(5, device)
    monkeypatch.setattr(transformer, "_recording", lambda _: False)
    for length in LENGTHS:
        model._rope(length, device)
    assert all(storage() is not None for storage in read)


@pytest.mark.parametrize("scaling", ["none", "dynamic", "longrope"])
def test_compiled_layers_take_slices_of_the_tables(scaling: str) -> None:
    eager, compiled = build(scaling).train(), build(scaling).train()
    for layer in compiled.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 37, (2, 33))
    for length in (32, 7, 12, 9, 32):
        losses = []
        for model in (eager, compiled):
            model.zero_grad()
            loss = model(tokens[:, :length], tokens[:, 1 : length + 1]).loss.objective
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for ours, theirs in zip(eager.parameters(), compiled.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
