"""``slipstream prepare``: sources to a folder of token shards.

One process reads the sources in order and cuts them into pieces, workers tokenise pieces, and the
pieces are joined in order. The result depends on sources and options only: not on the number of
workers, nor on how often the run was stopped and resumed. Memory is bounded by pieces in flight.
"""

import errno
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from slipstream.data.assemble import assemble
from slipstream.data.bpe import parse_vocab
from slipstream.data.documents import identity, read_fragments
from slipstream.data.manifest import VERSION, Manifest, load_manifest
from slipstream.data.parts import Reader, ResumableError
from slipstream.data.pieces import PIECE_BYTES, Piece, cut_pieces
from slipstream.data.shards import has_split, open_shards
from slipstream.data.sources import Source, resolve
from slipstream.data.tokenizer_file import TOKENIZER_FILE
from slipstream.data.tokenizers import (
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    require_eot,
)
from slipstream.data.workers import Job, run
from slipstream.data.workspace import Workspace, check_target
from slipstream.errors import ConfigError, DataError, SlipstreamError

SAMPLE_BYTES = 64 << 20
# Unless asked for more: a BPE worker takes 90 MB, and all of prepare should stay below 1 GB.
MOST_WORKERS = 8
_UNPACKED_PER_BYTE = 4
_NO_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file grew beyond the limit of file sizes",
}
# Called after each piece with the bytes of source files it took.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRequest:
    """What to prepare, and how."""

    sources: tuple[str, ...]
    """SOURCE arguments."""
    out: Path
    """Folder to create."""
    tokenizer: str
    """byte, train:VOCAB or a path."""
    text_field: str = "text"
    """Field of JSON lines and column of parquet that holds text."""
    val_fraction: float = 0.01
    """Share of documents that become validation data."""
    eot: str | None = None
    """Token that ends documents, None for the tokenizer's own."""
    max_bytes: int | None = None
    """Read at most this much unpacked source, None for all."""
    workers: int | None = None
    """Processes, None for one per core, at most ``MOST_WORKERS``."""
    overwrite: bool = False
    """Replace a prepared set of other inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a prepared folder holds."""

    documents: int
    """Documents in both splits."""
    tokens: int
    """Tokens in both splits."""
    text_bytes: int
    """UTF-8 bytes of text."""
    val_tokens: int
    """Tokens of the validation split."""
    vocab_size: int
    """Ids of the tokenizer."""
    seconds: float
    """Time taken."""
    skipped: int
    """Files of the standard library that are no text."""
    already: bool
    """It had been prepared before; nothing was done."""


def prepare_shards(request: PrepareRequest, progress: Progress | None = None) -> Summary:
    """Prepare ``request.out``; a rerun resumes.

    Raises ConfigError, DataError or DependencyError; then ``request.out`` is as it was before.
    """
    begin = time.perf_counter()
    _check(request)
    sources = resolve(request.sources)
    inputs = identify(request, sources)
    if check_target(request.out, inputs, request.overwrite) and _is_intact(request.out):
        return _summary(load_manifest(request.out), begin, skipped=0, already=True)
    reader = Reader(sources, request.text_field, request.max_bytes)
    workspace = Workspace(request.out, inputs)
    try:
        with workspace:
            manifest = _fill(workspace, request, reader, progress or (lambda read_bytes: None))
    except OSError as error:
        raise _explain(error, workspace) from error
    except SlipstreamError as error:
        raise type(error)(f"{error}{_kept(workspace)}") from error
    return _summary(manifest, begin, skipped=len(reader.skipped), already=False)


def source_bytes(request: PrepareRequest) -> int | None:
    """Bytes of source files that progress counts up to, None if unknown."""
    sources = resolve(request.sources)
    return None if any(not source.size for source in sources) else sum(s.size for s in sources)


def identify(request: PrepareRequest, sources: list[Source]) -> dict[str, object]:
    """What the result depends on: sources by name, size and time, tokenizer and options."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(
            f"{source.name}\0{source.size}\0{source.modified_ns}\0".encode(
                "utf-8", errors="surrogateescape"
            )
        )
    spec = request.tokenizer
    return {
        "layout": VERSION,
        "sources": list(request.sources),
        "files": len(sources),
        "files_sha256": digest.hexdigest(),
        "python": platform.python_version() if "stdlib" in request.sources else None,
        "tokenizer": spec if _is_made_here(spec) else load_tokenizer(spec, request.eot).hash,
        "eot": request.eot,
        "text_field": request.text_field,
        "val_fraction": request.val_fraction,
        "max_bytes": request.max_bytes,
    }


def _check(request: PrepareRequest) -> None:
    if not 0 <= request.val_fraction < 1:
        raise ConfigError(f"--val-fraction {request.val_fraction}: must be at least 0 and below 1")
    if request.max_bytes is not None and request.max_bytes < 1:
        raise ConfigError(f"--max-bytes {request.max_bytes}: must be at least 1")
    if request.workers is not None and request.workers < 1:
        raise ConfigError(f"--workers {request.workers}: must be at least 1")
    spec = request.tokenizer
    if spec.startswith("train:"):
        parse_vocab(spec)
    elif spec == "byte":
        make_tokenizer(spec, eot=request.eot)
    else:
        require_eot(load_tokenizer(spec, request.eot), spec)


def _is_made_here(spec: str) -> bool:
    return spec == "byte" or spec.startswith("train:")


def _is_intact(out: Path) -> bool:
    try:
        for split in ("train", "val"):
            if has_split(out, split):
                open_shards(out, split)
    except DataError:
        return False
    return True


def _fill(
    workspace: Workspace, request: PrepareRequest, reader: Reader, progress: Progress
) -> Manifest:
    tokenizer = _tokenizer(workspace, request, reader)
    job = Job(
        tokenizer_folder=workspace.tokenizer,
        text_field=request.text_field,
        folder=workspace.pieces,
    )
    count = 0

    def missing() -> Iterator[Piece]:
        nonlocal count
        for piece in cut_pieces(reader):
            count = piece.index + 1
            if workspace.has_piece(piece.index):
                progress(piece.read_bytes)
            else:
                yield piece

    with closing(run(missing(), job, _workers(request, reader))) as done:
        for piece in done:
            progress(piece.read_bytes)
    result = workspace.start_result()
    manifest = assemble(workspace.pieces, count, result, tokenizer, request.val_fraction)
    workspace.publish()
    return manifest


def _tokenizer(workspace: Workspace, request: PrepareRequest, reader: Reader) -> Tokenizer:
    """The tokenizer, saved where workers and a resumed run find it."""
    folder = workspace.tokenizer
    if not (folder / TOKENIZER_FILE).exists():
        tokenizer = make_tokenizer(request.tokenizer, lambda: sample_text(reader), request.eot)
        tokenizer.save(folder)
    return load_tokenizer(folder)


def sample_text(reader: Reader) -> Iterator[str]:
    """At most ``SAMPLE_BYTES`` of text to train a tokenizer on, spread over all sources.

    Every part is taken or left by a hash of its place, so the sample is the same on every run.
    """
    expected = sum(s.size * (_UNPACKED_PER_BYTE if _is_packed(s) else 1) for s in reader.sources)
    share = min(1.0, SAMPLE_BYTES / expected) if expected else 1.0
    left = SAMPLE_BYTES
    for part in reader:
        if identity(part.name, part.first + part.offset) >= share * (1 << 64):
            continue
        for fragment in read_fragments(part, reader.text_field):
            left -= fragment.num_bytes
            if left < 0:
                return
            yield fragment.text


def _is_packed(source: Source) -> bool:
    return source.path.endswith((".gz", ".zst", ".parquet"))


def _workers(request: PrepareRequest, reader: Reader) -> int:
    if request.workers is not None:
        return request.workers
    size = sum(source.size for source in reader.sources)
    if size and size <= PIECE_BYTES:
        return 1
    return min(MOST_WORKERS, _cores())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _explain(error: OSError, workspace: Workspace) -> DataError:
    reason = _NO_SPACE.get(error.errno or 0, error.strerror or str(error))
    fix = "free some space" if error.errno in _NO_SPACE else "check that it can be written"
    return ResumableError(
        f"--out {workspace.target}: {reason} ({error.filename or 'writing'}); {fix} and run again"
        f"{_kept(workspace)}"
    )


def _kept(workspace: Workspace) -> str:
    count = workspace.finished()
    if not count:
        return ""
    return f"; {count} finished pieces are kept in {workspace.folder} and will be used then"


def _summary(manifest: Manifest, begin: float, skipped: int, already: bool) -> Summary:
    splits = manifest.splits
    shards = [shard for split in splits.values() for shard in split.shards]
    return Summary(
        documents=sum(split.documents for split in splits.values()),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=sum(shard.bytes_of_text for shard in shards),
        val_tokens=sum(shard.tokens for shard in splits["val"].shards),
        vocab_size=manifest.tokenizer.vocab_size,
        seconds=time.perf_counter() - begin,
        skipped=skipped,
        already=already,
    )
