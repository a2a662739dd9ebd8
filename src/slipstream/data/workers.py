"""Tokenise pieces on several processes, at most one piece waiting per process.

Each worker has its own pipe, so it ends by itself when the parent is killed. Errors of a worker are
raised in the parent; a worker that dies is one too.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from slipstream.data.parts import ResumableError
from slipstream.data.pieces import Piece, write_piece
from slipstream.data.tokenizers import Tokenizer, load_tokenizer
from slipstream.errors import SlipstreamError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker needs to know."""

    tokenizer_folder: Path
    """Where the tokenizer was saved."""
    text_field: str
    """Field of JSON objects that holds text."""
    folder: Path
    """Where piece files go."""


def run(pieces: Iterator[Piece], job: Job, workers: int) -> Generator[Piece]:
    """Write every piece and yield it when it is done, in any order."""
    if workers == 1:
        return _run_here(pieces, job)
    return _run_apart(pieces, job, workers)


def _run_here(pieces: Iterator[Piece], job: Job) -> Generator[Piece]:
    tokenizer = load_tokenizer(job.tokenizer_folder)
    for piece in pieces:
        write_piece(piece, tokenizer, job.text_field, job.folder)
        yield piece


def _run_apart(pieces: Iterator[Piece], job: Job, workers: int) -> Generator[Piece]:
    pool: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, Piece] = {}
    try:
        for piece in pieces:
            if len(pool) < workers:
                connection = _start(pool, job)
            else:
                connection = _first_done(pool, list(busy))
                yield busy.pop(connection)
            busy[connection] = piece
            _send(pool, connection, piece)
        while busy:
            yield busy.pop(_first_done(pool, list(busy)))
    finally:
        _stop(pool)


def _start(pool: dict[Connection, BaseProcess], job: Job) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, job), daemon=True)
    # Ctrl-C reaches the whole process group, and the parent decides what it means. Workers inherit
    # the blocked signal, so it cannot hit them while they import either. Starting the tracker
    # unblocks signals, so it goes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    pool[ours] = process
    return ours


def _stop(pool: dict[Connection, BaseProcess]) -> None:
    for connection, process in pool.items():
        connection.close()
        process.terminate()
    for process in pool.values():
        process.join()


def _first_done(pool: dict[Connection, BaseProcess], busy: list[Connection]) -> Connection:
    connection = next(item for item in wait(busy) if isinstance(item, Connection))
    try:
        error = connection.recv()
    except (EOFError, ConnectionError):
        raise _death(pool[connection]) from None
    if error is not None:
        raise error
    return connection


def _send(pool: dict[Connection, BaseProcess], connection: Connection, piece: Piece) -> None:
    try:
        connection.send(piece)
    except ConnectionError:
        raise _death(pool[connection]) from None


def _death(process: BaseProcess) -> ResumableError:
    process.join()
    return ResumableError(
        f"a worker process died (exit code {process.exitcode}), perhaps for lack of memory; run "
        "again with fewer --workers"
    )


def _work(connection: Connection, job: Job) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = load_tokenizer(job.tokenizer_folder)
        while True:
            piece = connection.recv()
            connection.send(_attempt(piece, tokenizer, job))
    except (EOFError, ConnectionError):
        return


def _attempt(piece: Piece, tokenizer: Tokenizer, job: Job) -> Exception | None:
    try:
        write_piece(piece, tokenizer, job.text_field, job.folder)
    except (SlipstreamError, OSError) as error:
        return error
    except Exception:
        return RuntimeError(f"in a worker:\n{traceback.format_exc()}")
    return None
