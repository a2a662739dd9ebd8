"""How the command ends: exit codes, one line for what a user can mend, signals, lost readers."""

import errno
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from slipstream.cli import VERBS
from slipstream.errors import ConfigError
from tests.train.runs import arguments, environment, records, slipstream

FILE_ERRORS = [
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.ENOSPC,
    errno.EDQUOT,
]
code_name = errno.errorcode.get


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Installs a verb ``fake`` that runs a function."""

    def install(action: Callable[[], None]) -> None:
        module = types.ModuleType("slipstream.cli.fake")
        module.app = typer.Typer()
        module.app.command()(action)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(VERBS, "fake", ("fake", "Fake."))

    return install


def raises(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("code", FILE_ERRORS, ids=code_name)
def test_a_file_the_user_can_mend_is_one_line(code: int, verb: Callable) -> None:
    verb(raises(OSError(code, os.strerror(code), "some/file")))
    done = slipstream("fake")
    assert done.returncode == 2
    assert re.fullmatch(r"error: some/file: [^;\n]+; [^;\n]+\n", done.stderr), done.stderr


@pytest.mark.parametrize("code", FILE_ERRORS, ids=code_name)
def test_without_a_name_only_a_full_disk_is_told(code: int, verb: Callable) -> None:
    verb(raises(OSError(code, os.strerror(code))))
    if code in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        done = slipstream("fake")
        assert done.returncode == 2
        assert done.stderr.startswith("error: output: ")
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            slipstream("fake")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "some/file"),
        FileNotFoundError(errno.ENOENT, "No such file", "some/file"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_bug_keeps_its_traceback(error: Exception, verb: Callable) -> None:
    verb(raises(error))
    with pytest.raises(type(error)):
        slipstream("fake")


def test_a_broken_socket_is_not_taken_for_a_lost_reader(verb: Callable) -> None:
    verb(raises(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    with pytest.raises(RuntimeError, match="other than stdout") as caught:
        slipstream("fake")
    assert isinstance(caught.value.__cause__, BrokenPipeError)


@pytest.mark.parametrize(
    ("rank", "prefix"), [(None, "error: "), ("0", "error: "), ("3", "error (rank 3): ")]
)
def test_other_ranks_say_which_they_are(
    rank: str | None, prefix: str, verb: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    for error in (ConfigError("two\nlines"), OSError(errno.EACCES, "denied", "two\nlines")):
        verb(raises(error))
        done = slipstream("fake")
        assert done.returncode == 2
        assert done.stderr.startswith(f"{prefix}two lines")
        assert done.stderr.count("\n") == 1


def test_ctrl_c_in_a_verb_exits_with_130(verb: Callable) -> None:
    verb(raises(KeyboardInterrupt()))
    done = slipstream("fake")
    assert (done.returncode, done.stderr) == (130, "")


def test_the_signal_handlers_are_given_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    assert slipstream("train", "none.toml").returncode == 2
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


# A verb whose imports take forever, as those of torch can on a cold disk.
SLOW = """
import sys, time
import slipstream.cli as cli

def import_module(name):
    print("importing", flush=True)
    time.sleep(60)

cli.import_module = import_module
cli.main()
"""


def signalled(verb: str, how: int) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, verb],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stopped_while_starting_has_nothing_to_save(how: int) -> None:
    assert signalled("train", how) == (0, "stopped before training began: nothing to save\n")


def test_other_verbs_stopped_while_starting() -> None:
    assert signalled("report", signal.SIGINT) == (130, "")
    assert signalled("report", signal.SIGTERM) == (-signal.SIGTERM, "")


def without_reader(*args: str) -> subprocess.CompletedProcess[str]:
    """The command in a pipe whose reader has gone."""
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        return subprocess.run(
            [sys.executable, "-m", "slipstream", *args],
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=120,
            check=False,
        )
    finally:
        os.close(theirs)


def test_a_lost_reader_ends_short_verbs_quietly(run: Path) -> None:
    for args in (("config", "schema"), ("report", str(run)), ("sample", str(run))):
        done = without_reader(*args)
        assert (done.returncode, done.stderr) == (141, ""), args


def test_a_lost_reader_does_not_end_training(corpus: Path, tmp_path: Path) -> None:
    done = without_reader(*arguments("dense", corpus, tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert records(tmp_path / "run")[-1]["step"] == 12


def test_a_full_disk_under_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", "config", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "error: output: the disk is full; free some space and run again\n"
