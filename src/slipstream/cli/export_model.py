"""``slipstream export``: a run or model folder to a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from slipstream.data.tokenizer_file import find_end_token
from slipstream.models import size
from slipstream.models.hf import export_folder
from slipstream.models.hf.tokenizer import read_tokenizer
from slipstream.train.restore import load_trained

app = typer.Typer(help="Convert a run to a Hugging Face model folder.")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@app.command()
def export_model(
    run: Annotated[Path, typer.Argument(help="Run folder or model folder.", metavar="RUN")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write.", metavar="HF_DIR")],
    family: Annotated[
        str | None, typer.Option(help="model_type to write; unset: the one that fits.")
    ] = None,
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Dtype of the weights.")] = "bf16",
    checkpoint: Annotated[
        Literal["latest", "best"], typer.Option(help="Which checkpoint of a run.")
    ] = "latest",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already there.")
    ] = False,
) -> None:
    """Write RUN so that AutoModelForCausalLM.from_pretrained(HF_DIR) loads it."""
    trained = load_trained(run, checkpoint)
    name = export_folder(
        trained.model,
        to,
        trained.tokenizer_json,
        family,
        DTYPES[dtype],
        tokenizer_config=tokenizer_config(run, trained.tokenizer_json),
        overwrite=overwrite,
    )
    parameters = size(trained.model.config).total
    tokenizer = "with" if trained.tokenizer_json is not None else "without"
    print(f"{to}: {name}, {parameters:,} parameters, {dtype}, {tokenizer} tokenizer.json")


def tokenizer_config(run: Path, tokenizer_json: str | None) -> dict[str, Any] | None:
    """The tokenizer_config.json beside the model, else one with the end token of the vocabulary."""
    if tokenizer_json is None:
        return None
    text, config = read_tokenizer(run)
    if text == tokenizer_json and config is not None:
        return config
    parts = json.loads(tokenizer_json)
    vocab = parts["model"]["vocab"]
    pieces = dict(vocab) if isinstance(vocab, dict) else {piece[0]: 0 for piece in vocab}
    pieces |= {token["content"]: token["id"] for token in parts.get("added_tokens", ())}
    end = find_end_token(pieces)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
