"""``slipstream env``: versions, devices, implementations and a verdict, made for bug reports."""

from typing import Annotated

import typer

app = typer.Typer(help="Print versions, devices and which implementation each op uses.")
DTYPES = ("auto", "bf16", "fp32")


@app.command()
def env(
    dtype: Annotated[
        str, typer.Option(help="bf16 or fp32; default: what training would use here.")
    ] = "auto",
) -> None:
    """Print versions, devices and which implementation each op uses, and a verdict."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype}: expected bf16 or fp32", param_hint="--dtype")
    from slipstream.cli import env_job  # noqa: PLC0415

    env_job.show(dtype)
