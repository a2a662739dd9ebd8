"""The run folder: refused before anything is written, locked, never half-written."""

import errno
import fcntl
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError, ConfigError, DependencyError
from slipstream.train.config import RunConfig, TrackConfig
from slipstream.train.run_folder import RunFolder
from slipstream.train.trackers import check_trackers, start_trackers
from tests.train.runs import environment

CONFIG = RunConfig()


def tree(folder: Path) -> list[tuple[str, bytes]]:
    return [
        (str(p.relative_to(folder)), p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))
    ]


def prepared(folder: Path) -> None:
    folder.mkdir()
    (folder / "manifest.json").write_text('{"format": "slipstream-tokens"}')


def linked(folder: Path, to: Path) -> None:
    folder.symlink_to(to)


PLACES = {
    "file": ("file", "is a file"),
    "below-a-file": ("file/run", "file is a file"),
    "far-below-a-file": ("file/a/b/run", "file is a file"),
    "prepared-set": ("set", "which slipstream prepare made"),
    "in-a-prepared-set": ("set/runs/run", "which slipstream prepare made"),
    "link-into-a-set": ("to_set/run", "which slipstream prepare made"),
    "link-to-nothing": ("to_nothing", "is a link to nothing"),
    "raw-data": ("raw", "is data.path"),
    "long-name": ("x" * 300, "File name too long"),
    "long-name-above": ("x" * 300 + "/run", "File name too long"),
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("name", "reason"), PLACES.values(), ids=PLACES)
def test_a_place_no_run_can_have(name: str, reason: str, resume: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    prepared(tmp_path / "set")
    linked(tmp_path / "to_set", tmp_path / "set")
    linked(tmp_path / "to_nothing", tmp_path / "nothing")
    (tmp_path / "raw").mkdir()
    before = tree(tmp_path)
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        RunFolder(path).check(resume=resume, data=str(tmp_path / "raw"))
    assert f"--run-dir {path}: " in str(caught.value)
    assert reason in str(caught.value)
    assert "give" in str(caught.value)
    assert tree(tmp_path) == before


def test_a_foreign_manifest_and_a_folder_beside_the_data_are_fine(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a browser extension"}')
    (tmp_path / "raw").mkdir()
    before = tree(tmp_path)
    RunFolder(tmp_path / "raw" / "run").check(resume=False, data=str(tmp_path / "raw"))
    RunFolder(tmp_path / "a" / "b").check(resume=True)
    assert tree(tmp_path) == before


def test_a_place_that_cannot_be_written_is_found_by_trying(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run-dir /proc/run: cannot be used"):
        RunFolder(Path("/proc/run")).check(resume=False)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("there", ["nothing", "folder", "checkpoints"])
def test_every_refusal_of_the_system_is_one_line(
    code: int, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    if there != "nothing":
        (folder.checkpoints if there == "checkpoints" else folder.path).mkdir(parents=True)

    def refuse(dir: Path) -> None:
        assert dir.is_dir()
        raise OSError(code, os.strerror(code), str(dir / "tmp"))

    monkeypatch.setattr("slipstream.train.run_folder.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"cannot be used.*{os.strerror(code)}"):
        folder.check(resume=True)


@pytest.mark.parametrize("content", [b"[model\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_broken_config_file_is_named(content: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.changed_since(CONFIG) == []
    folder.config.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{folder.config}: .*delete it to go on"):
        folder.changed_since(CONFIG)


def test_start_replaces_whole_files_or_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.json"
    source.write_text("{}")
    folder = RunFolder(tmp_path / "run")
    folder.start(CONFIG, source)
    assert folder.changed_since(CONFIG) == []
    before = tree(folder.path)

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    other = RunConfig.model_validate({"train": {"steps": 7}})
    with pytest.raises(CheckpointError, match=r"run/config\.toml: cannot be written: No space"):
        folder.start(other, None)
    assert tree(folder.path) == before


HOLD = """
import sys
from pathlib import Path
from slipstream.errors import ConfigError
from slipstream.train.run_folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
try:
    folder.lock()
except ConfigError as error:
    print(error, flush=True)
else:
    print("locked", flush=True)
    sys.stdin.readline()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    first, second = hold(path), None
    try:
        assert said(first) == "locked"
        second = hold(path)
        line = said(second)
        assert f"another process is training in {path} (process {first.pid} on " in line
        assert "give another --run-dir" in line
        with pytest.raises(ConfigError, match="another process"):
            RunFolder(path).lock()
        first.kill()
        first.wait(timeout=60)
        # The lock of a process dies with it, whatever file it left.
        assert (path / ".lock").exists()
        assert not RunFolder(path).is_used()
        RunFolder(path).check(resume=False)
        third = RunFolder(path)
        third.lock()
        third.unlock()
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


def test_unlock_leaves_an_unused_folder_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "run")
    folder.unlock()
    folder.lock()
    assert (folder.path / ".lock").is_file()
    folder.unlock()
    folder.unlock()
    assert tree(tmp_path) == []
    folder.path.mkdir(parents=True)
    folder = RunFolder(folder.path)
    folder.lock()
    folder.unlock()
    assert folder.path.is_dir()
    folder.lock()
    folder.start(CONFIG, None)
    folder.unlock()
    assert [name for name, _ in tree(folder.path)] == ["config.toml"]
    folder.lock()
    folder.unlock()


def test_a_lock_file_removed_under_us_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its owner unlocks between our open and our lock.
    file, calls, real = tmp_path / ".lock", [], fcntl.flock

    def flock(handle: int, how: int) -> None:
        if not calls:
            file.unlink()
        calls.append(handle)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    RunFolder(tmp_path).lock()
    assert len(calls) == 2
    with pytest.raises(ConfigError, match="another process"):
        RunFolder(tmp_path).lock()


def test_a_file_system_without_locks_warns_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="has no locks.*make sure that no other process"):
        RunFolder(tmp_path).lock()


def test_every_missing_tracker_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(TrackConfig())
    for name in ("tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(DependencyError, match=rf"{name}, which is not installed.*\[track\]"):
            check_trackers(TrackConfig(to=(name,)))


class FakeTracker(types.ModuleType):
    """A tracker's module that remembers how it was started."""

    class Error(Exception):
        """As wandb's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.started: list[dict[str, object]] = []
        self.refusal: str | None = None

    def init(self, **settings: object) -> "FakeTracker":
        if self.refusal is not None:
            raise self.Error(self.refusal)
        self.started.append(settings)
        return self


def test_a_resumed_run_is_the_same_one_at_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TrackConfig(to=("wandb",))
    for first_step in (0, 5, 9, 0, 5):
        start_trackers(config, tmp_path, {}, first_step)
    ids = [settings["id"] for settings in fake.started]
    assert ids[0] == ids[1] == ids[2] != ids[3] == ids[4]
    assert {settings["resume"] for settings in fake.started} == {"allow"}
    assert (tmp_path / ".wandb_id").read_text() == f"{ids[4]}\n"
    fake.refusal = "api_key not configured"
    with pytest.raises(DependencyError, match=r"api_key not configured; run wandb login"):
        start_trackers(config, tmp_path, {}, 5)


def test_trackio_goes_on_with_the_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTracker("trackio")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for first_step in (0, 5):
        start_trackers(TrackConfig(to=("trackio",)), tmp_path, {}, first_step)
    assert [settings["resume"] for settings in fake.started] == ["never", "allow"]


def test_tensorboard_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first_step, last_step, value in ((0, 6, 1.0), (4, 8, 2.0)):
        (tracker,) = start_trackers(TrackConfig(to=("tensorboard",)), tmp_path, {}, first_step)
        for step in range(first_step + 1, last_step + 1):
            tracker.log({"loss": value}, step)
        tracker.finish()
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("loss")]
    assert points == [(n, 1.0) for n in range(1, 5)] + [(n, 2.0) for n in range(5, 9)]
