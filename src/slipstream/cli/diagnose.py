"""``slipstream diagnose``: where the time of a profile goes, why, and what to do about it.

The report, or with ``--json`` one object, is all that stdout gets; the rest goes to stderr. The
work is in ``diagnose_job``, loaded once the options are in order: it needs numpy, help does not.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError

EXIT_LIMIT_PASSED = 1
STEPS = 3
NOT_PAGES = (".json", ".gz", ".tar", ".tgz", ".sqlite", ".toml")
app = typer.Typer(add_completion=False, help="Say where a profile's time goes and what to do.")


@app.command(no_args_is_help=True)
def diagnose(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TRACE...",
            help="Profiles of one job: .json, .json.gz, .tar.gz, .sqlite, or folders of them.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the report.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write one self-contained HTML page.")
    ] = None,
    pair: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="What changed from job A to job B."),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Exit with 1 if this number is worse than VALUE."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Profile a few steps of this recipe.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --run: change a key of the recipe."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="With --run: steps to profile; default 3.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="With --run: folder for the traces; default traces/ and its name."),
    ] = None,
) -> None:
    """Say where a profile's time goes and what to do about it.

    Reads what torch.profiler writes, from any program and GPU vendor; needs no GPU itself.
    """
    _one_source(traces, pair, run)
    _writable(out)
    if run is None and (overrides or keep or steps is not None):
        raise ConfigError("--set, --steps and --keep go with --run RECIPE; leave them out")
    from slipstream.cli import diagnose_job  # noqa: PLC0415

    rules = fail_on or []
    diagnose_job.check_rules(rules, comparing=pair is not None)
    if run is not None:
        traces = _captured(run, overrides or [], steps, keep or Path("traces") / run.stem)
        if os.environ.get("RANK", "0") != "0":
            return
    before, paths = ([pair[0]], [pair[1]]) if pair else (None, traces or [])
    job = diagnose_job.diagnosed(paths, before)
    if out is not None:
        _write(out, job.page())
    failures = job.failures(rules)
    print(job.json(failures) if as_json else job.text(), end="", flush=True)
    _exit_with(failures)


def _write(out: Path, page: str) -> None:
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror or error}); give another path"
        ) from error
    print(f"page: {out}", file=sys.stderr)


def _exit_with(failures: Sequence[str]) -> None:
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(EXIT_LIMIT_PASSED)


def _one_source(
    traces: Sequence[Path] | None, pair: tuple[Path, Path] | None, run: Path | None
) -> None:
    named = {"TRACE": traces, "--compare": pair, "--run": run}
    given = [name for name, value in named.items() if value]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ConfigError(f"give one of TRACE..., --compare A B and --run RECIPE; found {found}")


def _writable(out: Path | None) -> None:
    """Refuse a page that could not be written before the work is done."""
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; give the name of a file, such as report.html")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")
    if out.name.lower().endswith(NOT_PAGES):
        # Most likely a trace named after -o by mistake, which the page would take the place of.
        raise ConfigError(f"--out {out}: not a name for a page; end it in .html")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: permission denied; give another path")


def _captured(
    recipe: Path, overrides: Sequence[str], steps: int | None, folder: Path
) -> list[Path]:
    # Here: it brings the trainer and torch, which nothing but --run needs.
    from slipstream.diagnose.capture import capture  # noqa: PLC0415

    capture(recipe, overrides, steps=STEPS if steps is None else steps, out_dir=folder)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    print(f"traces: {folder}", file=sys.stderr)
    return [folder / f"rank{rank}.json.gz" for rank in range(ranks)]
