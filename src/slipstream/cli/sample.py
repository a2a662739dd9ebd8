"""``slipstream sample``: continue a prompt with a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError

app = typer.Typer(help="Continue a prompt with a trained model.")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="Run folder or model folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to add at most; an end of text ends earlier.")
    ] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Sample from this much probability; 1: all.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the sampling, 0 or more.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="latest or best.")] = "latest",
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, if the folder has none.")
    ] = None,
) -> None:
    """Continue a prompt with a trained model; prints the prompt and what follows."""
    if checkpoint not in ("latest", "best"):
        raise ConfigError(f"--checkpoint {checkpoint}: expected latest or best")
    import torch  # noqa: PLC0415

    from slipstream.data.tokenizers import load_tokenizer  # noqa: PLC0415
    from slipstream.models.generate import check_sampling, generate  # noqa: PLC0415
    from slipstream.train import load_trained  # noqa: PLC0415

    check_sampling(temperature, top_p, seed)
    trained = load_trained(run, checkpoint)
    if tokenizer is None and trained.tokenizer_json is None:
        raise ConfigError(f"{run}: has no tokenizer.json; give one with --tokenizer")
    text = load_tokenizer(tokenizer or run)
    if text.vocab_size > trained.model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {text.vocab_size} tokens, the model only "
            f"{trained.model.config.vocab_size}; give the tokenizer it was trained with"
        )
    model = trained.model.to("cuda" if torch.cuda.is_available() else "cpu")
    made = generate(
        model,
        text.encode(prompt),
        tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=text.eot_id,
    )
    print(prompt + text.decode(made))
