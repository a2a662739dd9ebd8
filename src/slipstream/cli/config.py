"""``slipstream config``: what a recipe resolves to, and the schema editors complete from."""

import json
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from slipstream.config import difference, load, to_toml
from slipstream.train.config import RunConfig

app = typer.Typer(
    no_args_is_help=True, help="Show the resolved config of a recipe, or the JSON schema."
)


@app.command()
def show(
    recipe: Annotated[Path, typer.Argument(help="Recipe (.toml).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as many as you like.")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only what differs from defaults.")] = False,
) -> None:
    """Print the config a recipe and its overrides resolve to, as TOML."""
    config = load(RunConfig, recipe, overrides or ())
    text = tomli_w.dumps(difference(config)) if diff else to_toml(config)
    print(text, end="")


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes (an editor completes and checks them with it)."""
    print(json.dumps(RunConfig.model_json_schema(), indent=2))
