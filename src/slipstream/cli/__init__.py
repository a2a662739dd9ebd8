"""The ``slipstream`` command: one file per verb, loaded only when that verb runs.

Adding a verb is a module with a typer ``app`` and one line in ``VERBS``. A user's mistake prints
one line and exits with 2; anything else that escapes is a bug and keeps its traceback.
"""

import errno
import sys
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
    "env": ("env", "Print versions, devices and which implementation each op uses."),
}
EXIT_USER_ERROR = 2
_DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


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
    try:
        app()
    except SlipstreamError as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in _DISK:
            raise
        fail(f"{error.filename or 'output'}: {_DISK[error.errno]}; free some space and run again")


def fail(message: str) -> None:
    """Print ``error: message`` on one line of stderr and exit with 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(EXIT_USER_ERROR)
