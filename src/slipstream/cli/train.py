"""``slipstream train``: train a model from a recipe, alone or under torchrun."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train a model from a recipe.")


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe (.toml).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as many as you like.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder; default runs/ and the recipe's name.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")
    ] = False,
) -> None:
    """Train a model from a recipe.

    On several GPUs: torchrun --nproc-per-node N -m slipstream train RECIPE ...
    SIGTERM or Ctrl-C saves a checkpoint and exits with 0.
    """
    from slipstream.train import load_run_config  # noqa: PLC0415
    from slipstream.train import train as run_training  # noqa: PLC0415

    config = load_run_config(recipe, overrides or [])
    run_training(config, run_dir or Path("runs") / recipe.stem, resume=resume)
