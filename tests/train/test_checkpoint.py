"""Checkpoints: whole or not there, the right ones kept, damage found."""

import json
from pathlib import Path

import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.parallel import Ranks
from slipstream.train.checkpoint import (
    Checkpoints,
    Meta,
    best_of,
    check_model,
    choose,
    find,
    load,
    read_meta,
)

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), control=None)


def save(folder: Path, step: int, *, val_loss: float | None = None, **options: object) -> None:
    settings = {"keep": 2, "background": False} | options
    writer = Checkpoints(folder, ALONE, **settings)
    meta = Meta(step=step, next_sample=step, model={"d_model": 8}, world=1, val_loss=val_loss)
    writer.save({"model": {"w": torch.full((3,), float(step))}}, meta)
    writer.wait()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, val_loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
        save(tmp_path, step, val_loss=val_loss)
    assert [saved.meta.step for saved in find(tmp_path)] == [2, 4, 5]
    assert choose(tmp_path, "latest").meta.step == 5
    assert choose(tmp_path, "best").meta.step == 2


def test_a_background_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, ALONE, keep=1, background=True)
    weight = torch.zeros(1000, 1000)
    writer.save({"model": {"w": weight}}, Meta(step=1, next_sample=0, model={}, world=1))
    weight.fill_(7.0)
    writer.wait()
    state = {"model": {"w": torch.ones(1000, 1000)}}
    load(find(tmp_path)[0], state)
    assert state["model"]["w"].abs().max() == 0


def test_an_unfinished_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step_00000002.partial").mkdir()
    assert [saved.meta.step for saved in find(tmp_path)] == [1]


@pytest.mark.parametrize("cut", ["short", "gone", "meta"])
def test_a_truncated_checkpoint_is_named_with_the_way_out(cut: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = find(tmp_path)[0].path
    victim = folder / ("meta.json" if cut == "meta" else "__0_0.distcp")
    if cut == "gone":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-7])
    with pytest.raises(CheckpointError) as caught:
        find(tmp_path)
    assert str(victim) in str(caught.value)
    assert f"delete {folder} to use an earlier checkpoint" in str(caught.value)


def test_a_damaged_file_of_the_right_size_does_not_load(tmp_path: Path) -> None:
    save(tmp_path, 1)
    saved = find(tmp_path)[0]
    file = saved.path / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(saved, {"model": {"w": torch.zeros(3)}})


def test_another_models_checkpoint_is_refused_by_field(tmp_path: Path) -> None:
    save(tmp_path, 1)
    saved = find(tmp_path)[0]
    check_model(saved, {"d_model": 8})
    with pytest.raises(CheckpointError, match=r"model\.d_model is 8 there and 16 here"):
        check_model(saved, {"d_model": 16})


def test_no_checkpoint_and_none_evaluated(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        choose(tmp_path, "latest")
    save(tmp_path, 1)
    assert best_of(find(tmp_path)) is None
    with pytest.raises(CheckpointError, match="no checkpoint was evaluated"):
        choose(tmp_path, "best")


def test_a_failed_write_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    with pytest.raises(CheckpointError, match=r"could not be written.*No space left"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    state = {"model": {"w": torch.zeros(3)}}
    load(find(tmp_path)[0], state)
    assert state["model"]["w"].tolist() == [1.0, 1.0, 1.0]


def test_meta_round_trips_infinity(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, ALONE, keep=1, background=False)
    model = {"moe": {"balance": {"threshold": float("inf")}}}
    writer.save({"w": torch.zeros(1)}, Meta(step=1, next_sample=0, model=model, world=1))
    path = find(tmp_path)[0].path
    assert read_meta(path).model == model
    assert json.loads((path / "meta.json").read_text())["step"] == 1
