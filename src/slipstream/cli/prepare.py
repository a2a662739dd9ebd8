"""``slipstream prepare``: text to token shards."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from slipstream.data.prepare import PrepareRequest, Summary, prepare_shards, source_bytes
from slipstream.data.prepare import Progress as Report

EXIT_INTERRUPTED = 130
app = typer.Typer(add_completion=False, help="Turn text into token shards to train on.")


@app.command(no_args_is_help=True)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files and folders (.txt .md .rst .py .jsonl, .gz and .zst of them, .parquet), "
            "stdlib (source code of this Python), hf:NAME[:SPLIT] (Hugging Face data set).",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to create.")],
    tokenizer: Annotated[
        str,
        typer.Option(help="byte, train:VOCAB (BPE trained on this text), or a tokenizer.json."),
    ],
    text_field: Annotated[
        str, typer.Option(help="Field of JSON lines, or column of parquet, that holds the text.")
    ] = "text",
    val_fraction: Annotated[
        float, typer.Option(help="Share of documents set aside for validation.")
    ] = 0.01,
    eot: Annotated[
        str | None, typer.Option(help="Token that ends documents, if the usual ones are missing.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Read only so many bytes of (unpacked) source.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; default: one per core, at most 8.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a prepared set of other inputs.")
    ] = False,
) -> None:
    """Turn text into token shards to train on; run again to resume a stopped run."""
    request = PrepareRequest(
        sources=tuple(sources),
        out=out,
        tokenizer=tokenizer,
        text_field=text_field,
        val_fraction=val_fraction,
        eot=eot,
        max_bytes=max_bytes,
        workers=workers,
        overwrite=overwrite,
    )
    try:
        with _progress(request) as report:
            summary = prepare_shards(request, report)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print(describe(out, summary))


def describe(out: Path, summary: Summary) -> str:
    """The closing line (and what deserves a note)."""
    if summary.already:
        return f"{out}: already prepared ({summary.documents} documents, {summary.tokens} tokens)"
    rate = summary.tokens / max(summary.seconds, 1e-9)
    lines = [
        f"{out}: {summary.documents} documents, {summary.tokens} tokens "
        f"({summary.val_tokens} for validation) from {summary.text_bytes} bytes of text, "
        f"vocabulary {summary.vocab_size}, {rate:,.0f} tokens/s, {summary.seconds:.1f} s"
    ]
    if summary.skipped:
        lines.append(f"note: {summary.skipped} files of the standard library are not text; skipped")
    if not summary.val_tokens:
        lines.append("note: no validation split (one document, or --val-fraction 0)")
    return "\n".join(lines)


@contextmanager
def _progress(request: PrepareRequest) -> Generator[Report | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("tokenising", total=source_bytes(request))
        yield lambda read_bytes: bar.advance(task, read_bytes)
