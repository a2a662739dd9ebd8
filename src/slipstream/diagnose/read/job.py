"""From what the user names to one trace per rank."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from slipstream.diagnose.read.chrome import read_chrome
from slipstream.diagnose.read.chunks import NotATraceError
from slipstream.diagnose.read.files import SUFFIXES, is_sqlite, open_traces
from slipstream.diagnose.read.limits import Limits
from slipstream.diagnose.read.nsys import read_nsys
from slipstream.diagnose.trace import Job, Trace
from slipstream.errors import DataError

Progress = Callable[[int, int], None]
_RANK = re.compile(r"(?:rank|worker)[-_ =.]?(\d{1,7})(?!\d)", re.IGNORECASE)

_PROCESS = re.compile(r"([^/:]+_\d+)\.\d{10,}\.pt\.trace\.json(?:\.gz)?$")
"""Host and process id in a file name of torch's tensorboard_trace_handler, before the time."""


def read(
    paths: Sequence[str | Path] | str | Path,
    *,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Job:
    """Read the traces of one job: files, folders of them, or tar archives, one trace per rank.

    ``progress(done, total)`` is called with bytes on disk as reading goes on. DataError, in one
    line, for what is missing, no trace, truncated, two traces of one rank, or beyond ``limits``.
    """
    named = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not named:
        raise DataError("TRACE: none given; name trace files, folders of them, or archives")
    files = [(file, path.is_dir()) for path in named for file in _files(path)]
    _check_once([file for file, _ in files])
    limits = limits or Limits()
    done, total = 0, sum(file.stat().st_size for file, _ in files)

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(min(done, total), total)

    traces: list[Trace] = []
    skipped: list[str] = []
    for file, in_folder in files:
        try:
            for trace in _traces(file, limits, advance, skipped):
                traces.append(trace)
                if len(traces) > limits.max_traces:
                    raise DataError(f"{file}: more than {limits.max_traces} traces; name fewer")
        except NotATraceError as error:
            if not in_folder:
                raise
            skipped.append(str(error))
    if not traces:
        why = skipped[0] if skipped else "no member of the archive ends in .json or .json.gz"
        raise DataError(f"{named[0]}: no trace found ({why})")
    traces.sort(key=lambda trace: (trace.rank is None, trace.rank or 0, trace.source))
    _check_ranks(traces)
    return Job(title=_title(named), traces=tuple(traces), problems=tuple(skipped))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.name.lower().endswith(SUFFIXES)
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise DataError(f"{path}: no trace in this folder; traces end in {' '.join(SUFFIXES)}")
        return files
    if not path.exists():
        raise DataError(f"TRACE {path}: no such file or folder; check the path")
    if not path.is_file():
        raise DataError(f"TRACE {path}: not a regular file; name a trace file or a folder")
    return [path]


def _check_once(files: list[Path]) -> None:
    """DataError for a file named twice: its times would count for two ranks."""
    seen: dict[Path, Path] = {}
    for file in files:
        before = seen.setdefault(file.resolve(), file)
        if before is not file:
            raise DataError(f"{file}: the same file as {before}; name each file once")


def _traces(
    file: Path, limits: Limits, advance: Callable[[int], None], skipped: list[str]
) -> Iterator[Trace]:
    """The traces of a file; what an archive holds besides is added to ``skipped``."""
    try:
        if is_sqlite(file):
            traces = list(read_nsys(file, limits))
            advance(file.stat().st_size)
            yield from map(_with_rank, traces) if len(traces) == 1 else traces
            return
        for name, stream in open_traces(file, limits, advance):
            try:
                trace = read_chrome(stream, name, limits)
            except NotATraceError as error:
                if name == str(file):
                    raise
                skipped.append(str(error))
            else:
                yield _with_rank(trace)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error


def _with_rank(trace: Trace) -> Trace:
    """The trace with the rank its file name tells, if its content does not."""
    if trace.rank is not None:
        return trace
    inner = Path(trace.source.rpartition(":")[2])
    folder = inner.parent.name or Path(trace.source).parent.name
    found = _RANK.search(inner.name) or _RANK.search(folder)
    return replace(trace, rank=int(found[1])) if found else trace


def _check_ranks(traces: list[Trace]) -> None:
    for before, after in pairwise(traces):
        if before.rank is not None and before.rank == after.rank:
            raise DataError(
                f"{before.source} and {after.source} are both of rank {after.rank}; "
                "name the files of one capture of one job"
            )
        one, other = (_PROCESS.search(trace.source) for trace in (before, after))
        if before.rank is None and one and other and one[1] == other[1]:
            raise DataError(
                f"{before.source} and {after.source} are of one process at two times; name one of "
                "them, and capture with schedule(..., repeat=1)"
            )


def _title(named: list[Path]) -> str:
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    return f"{named[0].name or named[0]}{more}"
