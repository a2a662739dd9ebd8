"""``slipstream export``: a run or model folder to a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(help="Convert a run to a Hugging Face model folder.")


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
    import torch  # noqa: PLC0415

    from slipstream.models import size  # noqa: PLC0415
    from slipstream.models.hf import export_folder  # noqa: PLC0415
    from slipstream.train.restore import load_trained  # noqa: PLC0415

    trained = load_trained(run, checkpoint)
    name = export_folder(
        trained.model,
        to,
        trained.tokenizer_json,
        family,
        {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
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
    from slipstream.data.tokenizer_file import find_end_token  # noqa: PLC0415
    from slipstream.models.hf.tokenizer import read_tokenizer  # noqa: PLC0415

    text, config = read_tokenizer(run)
    if text == tokenizer_json and config is not None:
        return config
    parts = json.loads(tokenizer_json)
    vocab = parts["model"]["vocab"]
    pieces = dict(vocab) if isinstance(vocab, dict) else {piece[0]: 0 for piece in vocab}
    pieces |= {token["content"]: token["id"] for token in parts.get("added_tokens", ())}
    end = find_end_token(pieces)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
