"""``slipstream config``: what a recipe resolves to, and the schema editors complete from."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

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
    from slipstream.config import difference, to_toml  # noqa: PLC0415
    from slipstream.train.config import load_run_config  # noqa: PLC0415

    config = load_run_config(recipe, overrides or [])
    text = tomli_w.dumps(difference(config)) if diff else to_toml(config)
    print(text, end="")


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes (an editor completes and checks them with it)."""
    from slipstream.train.config import RunConfig  # noqa: PLC0415

    text = json.dumps(_portable(RunConfig.model_json_schema()), indent=2, allow_nan=False)
    print(text)


def _portable(node: Any) -> Any:
    # JSON has no infinity and an editor refuses a schema that holds one, so such a default is left
    # out. Releases of pydantic differ in writing 0 or 0.0; the schema shall not.
    if isinstance(node, dict):
        return {key: _portable(value) for key, value in node.items() if not _is_infinite(value)}
    if isinstance(node, list):
        return [_portable(value) for value in node]
    return int(node) if isinstance(node, float) and node.is_integer() else node


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
