"""Checkpoints: whole or not there, the right ones kept, damage found."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.parallel import Ranks
from slipstream.train import load_trained
from slipstream.train.checkpoint import (
    Checkpoints,
    Meta,
    best_of,
    check_data,
    check_model,
    choose,
    find,
    has_rng,
    latest,
    load,
    read_meta,
    rng_state,
)
from slipstream.train.run_folder import RunFolder
from tests.train.runs import ROOT, TORCHRUN, environment

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


def change_meta(path: Path, **changes: object) -> None:
    file = path / "meta.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def test_a_damaged_file_without_a_checksum_does_not_load(tmp_path: Path) -> None:
    save(tmp_path, 1)
    change_meta(find(tmp_path)[0].path, checksums={})
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


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_two_flipped_bytes_are_found_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    saved = find(tmp_path)[0]
    assert set(saved.meta.checksums) == set(saved.meta.files) == {"__0_0.distcp", ".metadata"}
    file = saved.path / name
    content = bytearray(file.read_bytes())
    for place in (len(content) // 2, -9):
        content[place] ^= 1
    file.write_bytes(content)
    state = {"model": {"w": torch.zeros(3)}}
    with pytest.raises(CheckpointError) as caught:
        load(find(tmp_path)[0], state)
    assert str(file) in str(caught.value)
    assert f"delete {saved.path} to use an earlier checkpoint" in str(caught.value)
    assert state["model"]["w"].tolist() == [0.0, 0.0, 0.0]


GARBAGE = {
    "step": ["1", -1, 1.5, True, None],
    "next_sample": [-1, "x"],
    "world": [0, [1]],
    "model": [[], "x", None],
    "val_loss": ["1.0", float("nan")],
    "files": [[], {"a": -1}, {"a": "1"}],
    "checksums": [{"a": 1}],
    "surprise": [1],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in GARBAGE.items() for value in values]
)
def test_meta_of_the_wrong_type_is_named(key: str, value: object, tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_00000001"
    change_meta(path, **{key: value})
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert f"{path / 'meta.json'}: {key}" in str(caught.value)
    assert f"delete {path}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "\xff", "[" * 100_000])
def test_meta_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "step_00000001" / "meta.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"{file}: cannot be read"):
        latest(tmp_path)


def test_meta_of_an_older_version_is_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_00000001"
    newer = ("num_tokens", "data_hash", "seq_len", "seed", "checksums")
    change_meta(path, **dict.fromkeys(newer, ...))
    saved = latest(tmp_path)
    assert saved is not None
    assert check_data(saved, num_tokens=5, data_hash="a", seq_len=8, seed=1) == []
    load(saved, {"model": {"w": torch.zeros(3)}})


def test_what_differs_in_the_data_is_listed(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, ALONE, keep=1, background=False)
    seen = {"num_tokens": 100, "data_hash": "a", "seq_len": 8, "seed": 0}
    writer.save({"w": torch.zeros(1)}, Meta(step=1, next_sample=0, model={}, world=1, **seen))
    saved = find(tmp_path)[0]
    assert check_data(saved, **seen) == []
    assert check_data(saved, **(seen | {"data_hash": None})) == []
    assert check_data(saved, num_tokens=90, data_hash="b", seq_len=16, seed=1) == [
        "training tokens: 100 -> 90",
        "hash of the training tokens: a -> b",
        "data.seq_len: 8 -> 16",
        "train.seed: 0 -> 1",
    ]


def test_a_model_that_cannot_be_built_is_one_line(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1)
    path = tmp_path / "checkpoints" / "step_00000001"
    for model in ({"d_model": "x"}, {"nonsense": 1}, {"d_model": 8, "num_heads": 3}):
        change_meta(path, model=model)
        with pytest.raises(CheckpointError) as caught:
            load_trained(tmp_path)
        assert f"{path / 'meta.json'}: model" in str(caught.value)
        assert f"delete {path}" in str(caught.value)


class Killed(BaseException):
    """Ends the code under test where SIGKILL would have."""


def kill_in_rmtree(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, **_: object) -> None:
        files = sorted(Path(path).iterdir()) if Path(path).exists() else []
        if files:
            files[0].unlink()
            raise Killed

    monkeypatch.setattr("slipstream.train.checkpoint.shutil.rmtree", half)


def test_killed_while_pruning_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    save(run.checkpoints, 1)
    save(run.checkpoints, 2)
    with pytest.MonkeyPatch.context() as patch:
        kill_in_rmtree(patch)
        with pytest.raises(Killed):
            save(run.checkpoints, 3)
    assert [saved.meta.step for saved in find(run.checkpoints)] == [2, 3]
    assert len(list(run.checkpoints.iterdir())) == 3, "the half-deleted one is hidden"
    save(run.checkpoints, 4)
    assert [saved.meta.step for saved in find(run.checkpoints)] == [3, 4]


def test_killed_while_a_step_is_written_again_keeps_one_of_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        kill_in_rmtree(patch)
        with pytest.raises(Killed):
            save(tmp_path, 1)
    load(find(tmp_path)[0], {"model": {"w": torch.zeros(3)}})


def damage(path: Path) -> Path:
    (path / "__0_0.distcp").unlink()
    return path


def test_a_damaged_older_checkpoint_blocks_neither_the_newest_nor_a_run(tmp_path: Path) -> None:
    save(tmp_path, 1, val_loss=1.0)
    save(tmp_path, 2, val_loss=2.0)
    old = damage(tmp_path / "step_00000001")
    assert choose(tmp_path, "latest").meta.step == 2
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp.*delete {old}"):
        choose(tmp_path, "best")
    for step in (3, 4):
        save(tmp_path, step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step_0000000{n}" for n in (1, 2, 3, 4)], "left alone, and not counted"
    shutil.rmtree(old)
    assert choose(tmp_path, "best").meta.step == 2


def test_a_damaged_newest_checkpoint_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    new = damage(tmp_path / "step_00000002")
    for which in ("latest", "best"):
        with pytest.raises(CheckpointError, match=rf"__0_0\.distcp.*delete {new}"):
            choose(tmp_path, which)
    shutil.rmtree(new)
    assert choose(tmp_path, "latest").meta.step == 1


def test_a_background_write_shows_once_polled(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, ALONE, keep=1, background=True)
    assert not writer.is_written()
    writer.poll(False)
    writer.save({"w": torch.zeros(1000)}, Meta(step=1, next_sample=0, model={}, world=1))
    deadline = time.monotonic() + 60
    while not writer.is_written():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.poll(False)
    assert find(tmp_path) == []
    writer.poll(True)
    assert [saved.meta.step for saved in find(tmp_path)] == [1]
    assert not writer.is_written()
    writer.poll(True)


def test_more_than_eight_digits_of_steps_are_in_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert [saved.meta.step for saved in find(tmp_path)] == [99_999_999, 100_000_000]


def test_a_disk_full_at_the_last_moment_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.train.checkpoint.os.fsync", full)
    with pytest.raises(CheckpointError, match=r"step_00000002: could not be written.*No space"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_random_states_of_another_device_are_told_apart(tmp_path: Path) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    writer = Checkpoints(tmp_path, ALONE, keep=9, background=False)
    states = {1: rng_state(cpu), 2: rng_state(cpu) | {"cuda": torch.zeros(16, dtype=torch.uint8)}}
    for step, state in states.items():
        meta = Meta(step=step, next_sample=0, model={}, world=1)
        writer.save({"w": torch.full((2,), 7.0), "rng": {"rank0": state}}, meta)
    on_cpu, on_gpu = find(tmp_path)
    assert has_rng(on_cpu, 0, cpu)
    assert not has_rng(on_cpu, 0, cuda)
    assert not has_rng(on_cpu, 1, cpu)
    assert has_rng(on_gpu, 0, cpu)
    assert has_rng(on_gpu, 0, cuda)
    for saved in (on_cpu, on_gpu):
        state = {"w": torch.zeros(2)}
        load(saved, state)
        assert state["w"].tolist() == [7.0, 7.0]
    (on_cpu.path / ".metadata").write_bytes(b"\x80nonsense")
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read.*delete"):
        has_rng(on_cpu, 0, cpu)


TWO_RANKS = """
import sys, time
from pathlib import Path
import torch
from slipstream.errors import CheckpointError
from slipstream.parallel import connect
from slipstream.train.checkpoint import Checkpoints, Meta, find, load

folder = Path(sys.argv[1])
with connect("cpu") as ranks:
    writer = Checkpoints(folder, ranks, keep=2, background=True)
    state = {f"w{ranks.rank}": torch.full((5,), float(ranks.rank))}
    writer.save(state, Meta(step=1, next_sample=0, model={}, world=2))
    deadline, polls = time.monotonic() + 60, 0
    while not (everywhere := all(ranks.gather(writer.is_written()))):
        assert time.monotonic() < deadline
        writer.poll(everywhere)
        polls += 1
    assert find(folder) == []
    ranks.barrier()
    writer.poll(everywhere)
    (saved,) = find(folder)
    assert sorted(saved.meta.checksums) == sorted(saved.meta.files), saved.meta
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(saved.meta.files)
    load(saved, state, ranks)
    ranks.barrier()
    if ranks.is_first:
        file = saved.path / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[-5] ^= 3
        file.write_bytes(content)
    ranks.barrier()
    for action in (
        lambda: load(saved, state, ranks),
        lambda: Checkpoints(Path(__file__) / "below", ranks, keep=1, background=True).save(
            state, Meta(step=1, next_sample=0, model={}, world=2)
        ),
    ):
        try:
            action()
        except CheckpointError as error:
            with open(f"{sys.argv[2]}{ranks.rank}", "a") as told:
                print(error, file=told)
"""


def test_two_ranks_publish_when_both_are_done_and_hear_of_each_others_faults(
    tmp_path: Path,
) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    done = subprocess.run(
        [
            sys.executable,
            *TORCHRUN,
            "2",
            str(script),
            str(tmp_path / "checkpoints"),
            str(tmp_path / "told"),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        damaged, unwritten = (tmp_path / f"told{rank}").read_text().splitlines()
        assert "__1_0.distcp: is not what was written" in damaged
        assert "could not be written" in unwritten
