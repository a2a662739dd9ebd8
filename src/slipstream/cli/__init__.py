"""The ``slipstream`` command: one file per verb, loaded only when that verb runs.

Adding a verb is a module with a typer ``app`` and one line in ``VERBS``. A user's mistake, or a
file that cannot be read or written, prints one line and exits with 2; Ctrl-C exits with 130, a
reader of stdout that went away with 141; anything else that escapes is a bug and keeps its
traceback.
"""

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slipstream.errors import SlipstreamError

VERBS = {
    "prepare": ("prepare", "Turn text into token shards to train on."),
    "train": ("train", "Train a model from a recipe."),
    "sample": ("sample", "Continue a prompt with a trained model."),
    "report": ("report", "Summarise a run and draw its loss curve."),
    "import": ("import_model", "Convert a Hugging Face model folder to a Slipstream one."),
    "export": ("export_model", "Convert a run to a Hugging Face model folder."),
    "config": ("config", "Show the resolved config of a recipe, or the JSON schema."),
    "bench": ("bench", "Measure ops, the MoE layer and whole steps beside their peers."),
    "tune": ("tune", "Measure kernel configurations on this device and keep the fastest."),
    "verify": ("verify", "Hold every op on this machine to its fp64 truth."),
    "diagnose": ("diagnose", "Say where a profile's time goes and what to do."),
    "env": ("env", "Print versions, devices and which implementation each op uses."),
}
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_NO_READER = 128 + signal.SIGPIPE
_NO_ACCESS = "change its permissions or give another path"
_FULL = "free some space and run again"
_FILE_ERRORS = {
    errno.EACCES: ("permission denied", _NO_ACCESS),
    errno.EPERM: ("not permitted", _NO_ACCESS),
    errno.EROFS: ("its file system is read-only", "give a path on another one"),
    errno.ENOTDIR: ("a part of this path is a file, not a folder", "give another path"),
    errno.EISDIR: ("is a folder, not a file", "give the path of a file"),
    errno.ENAMETOOLONG: ("the name is too long", "give a shorter one"),
    errno.EFBIG: ("larger than a file may be here", "raise the limit (ulimit -f)"),
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("the disk quota is used up", _FULL),
}
# These come from writing, where the system does not say to which file.
_NAMELESS = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)


class LazyGroup(TyperGroup):
    """Lists the verbs from ``VERBS`` and imports a verb's module only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Verb names in the order of a first use."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries the one-line help; nothing is imported."""
        return TyperCommand(cmd_name, help=VERBS[cmd_name][1]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command of the verb about to run."""
        name, stub, rest = super().resolve_command(ctx, args)
        if name not in VERBS:
            return name, stub, rest
        module = import_module(f"slipstream.cli.{VERBS[name][0]}")
        command = typer.main.get_command(module.app)
        command.name = name
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; what click would turn into a silent exit with 1 is seen to here."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError as error:
            if stdout_has_reader():
                raise RuntimeError("a pipe or socket other than stdout broke") from error
            drop_stdout()
            sys.exit(EXIT_NO_READER)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def slipstream() -> None:
    """Train dense and Mixture-of-Experts language models faster."""


def main() -> None:
    """Entry point: run a verb; a user's mistake is one line on stderr and exit code 2."""
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    training = sys.argv[1:2] == ["train"]
    with _stop_while_starting() if training else nullcontext():
        try:
            _run(training)
        except SlipstreamError as error:
            fail(str(error))
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except OSError as error:
            text = explain(error)
            if text is None:
                raise
            fail(text)


def fail(message: str) -> None:
    """Print ``error: message`` on one line of stderr and exit with 2; other ranks say which."""
    rank = os.environ.get("RANK", "0")
    prefix = "error" if rank == "0" else f"error (rank {rank})"
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()
    with suppress(OSError):
        # In one call, or lines of several ranks run into each other.
        sys.stderr.write(f"{prefix}: " + " ".join(message.split()) + "\n")
        sys.stderr.flush()
    sys.exit(EXIT_USER_ERROR)


def explain(error: OSError) -> str | None:
    """File, state and fix of an error a user can mend; None for any other."""
    if error.errno not in _FILE_ERRORS:
        return None
    if error.filename is None and error.errno not in _NAMELESS:
        return None
    state, fix = _FILE_ERRORS[error.errno]
    return f"{error.filename or 'output'}: {state}; {fix}"


def stdout_has_reader() -> bool:
    """False if stdout is a pipe and whoever read it has gone."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return True
    poll = select.poll()
    poll.register(number, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_stdout() -> None:
    """Send what is left in stdout nowhere; the interpreter would fail on it when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _run(training: bool) -> None:
    try:
        app()
    except SystemExit:
        # Here and not when the interpreter ends, where a full disk could no longer be reported.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            drop_stdout()
            if not training:
                sys.exit(EXIT_NO_READER)
        raise


@contextmanager
def _stop_while_starting() -> Generator[None]:
    # Python has no handler for SIGTERM, and imports take seconds. The trainer puts its own handlers
    # in place once it can save. Several ranks keep the default: while they wait for each other no
    # handler runs, and torchrun ends them all.
    numbers = (signal.SIGTERM, signal.SIGINT)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, _nothing_to_save)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing_to_save(number: int, frame: Any) -> None:
    # Not an exception: one raised in the middle of an import can be swallowed there.
    os.write(2, b"stopped before training began: nothing to save\n")
    os._exit(0)
