"""``slipstream import``: a Hugging Face model folder to a Slipstream one."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert a Hugging Face model folder to a Slipstream one.")


@app.command()
def import_model(
    hf_dir: Annotated[
        Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="HF_DIR")
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder to write.", metavar="DIR")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already there.")
    ] = False,
) -> None:
    """Convert HF_DIR (llama, qwen3, mixtral, qwen3_moe, olmoe); values are kept bit for bit."""
    from slipstream.models import size  # noqa: PLC0415
    from slipstream.models.hf import import_folder  # noqa: PLC0415

    config = import_folder(hf_dir, to, overwrite=overwrite)
    tokenizer = "with" if (to / "tokenizer.json").is_file() else "without"
    print(f"{to}: {size(config).total:,} parameters, {tokenizer} tokenizer.json")
