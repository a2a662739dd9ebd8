"""Mutated traces end in figures or in one line, never in another exception."""

import gzip
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.diagnose import JobAccount, Limits, account, read
from slipstream.errors import DataError
from tests.diagnose.test_read_nsys import export

ASSETS = Path(__file__).parent / "assets"
LIMITS = Limits(max_bytes=2**26, max_event_bytes=2**22, max_name_bytes=2**24, max_events=10**5)
VALUES = (
    None, True, False, 0, -1, 1.5, -0.0, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 1e308, "", "x",
    "NaN", "1e999999999", "-1.5", "\ud7ff", "\x00", [], {}, [[]], {"a": {}}, [1, "2", None],
)  # fmt: skip
TOKENS = (
    b"NaN", b"-Infinity", b"inf", b"null", b"1e400", b"-0", b'"', b"\\", b"{", b"}", b"[", b"]",
    b",", b":", b"\xff", b"\xc3\x28", b"\x00", b"\n", b"9" * 40, b"0x1", b"// comment", b"\\u0000",
    b"\\ud800",
)  # fmt: skip


def survives(file: Path) -> bool:
    """Whether the file could be read; then its accounting holds, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            counted = account(read(file, limits=LIMITS))
        except DataError as error:
            message = str(error)
        else:
            return holds(counted)
    assert "\n" not in message
    assert str(file.parent) in message
    return False


def holds(counted: JobAccount) -> bool:
    """Whether the parts of every rank add up."""
    for one in counted.ranks:
        split = one.split
        parts = (
            split.compute_ns,
            split.exposed_communication_ns,
            split.exposed_copies_ns,
            split.idle_ns,
        )
        assert min(parts) >= 0
        assert sum(parts) == split.span_ns
    return True


def small_trace() -> bytes:
    """Events of every kind from a public trace, with their metadata."""
    whole = json.loads(gzip.decompress((ASSETS / "nccl_data.json.gz").read_bytes()))
    events = whole["traceEvents"]
    kept = [one for one in events if "nccl" in one["name"] or one["ph"] in "M"][:60]
    kept += [one for one in events if one.get("cat") in ("kernel", "cpu_op", "gpu_memcpy")][:60]
    kept += [one for one in events if one["name"].startswith(("ProfilerStep", "Optimizer"))]
    kept += [one for one in events if one.get("cat") in ("cuda_runtime", "fwdbwd")][:40]
    return json.dumps(whole | {"traceEvents": kept}).encode()


@pytest.fixture(scope="module")
def trace() -> bytes:
    return small_trace()


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def flip_bits(data: bytes, draw: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def insert(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data))
        data = data[:at] + draw.choice(TOKENS) + data[at + draw.randrange(3) :]
    return data


def move_pieces(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.sample(range(len(data)), 2))
    at = draw.randrange(len(data))
    return data[:at] + data[start:end] + data[at:]


def swap_values(data: bytes, draw: random.Random) -> bytes:
    whole = json.loads(data)
    events = whole["traceEvents"]
    for _ in range(draw.randrange(1, 12)):
        target = draw.choice([whole, *[one for one in events if isinstance(one, dict)]])
        if isinstance(target.get("args"), dict) and target["args"] and draw.random() < 0.5:
            target = target["args"]
        target[draw.choice([*target, "dur"])] = draw.choice(VALUES)
        if not isinstance(whole["traceEvents"], list):
            break
        events.append(draw.choice(events) if draw.random() < 0.5 else draw.choice(VALUES))
    return json.dumps(whole).encode()


MUTATIONS = {
    mutation.__name__: mutation for mutation in (cut, flip_bits, insert, move_pieces, swap_values)
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_mutated_text(tmp_path: Path, trace: bytes, name: str, seed: int) -> None:
    mutation: Callable[[bytes, random.Random], bytes] = MUTATIONS[name]
    draw = random.Random(f"{name} {seed}")
    outcomes = set()
    for _ in range(25):
        file = tmp_path / "t.json"
        file.write_bytes(mutation(trace, draw))
        outcomes.add(survives(file))
    if name == "cut":
        assert outcomes == {False}


@pytest.mark.parametrize("seed", range(3))
def test_mutated_gzip(tmp_path: Path, trace: bytes, seed: int) -> None:
    packed, draw = gzip.compress(trace), random.Random(seed)
    for mutation in (cut, flip_bits, insert, move_pieces):
        for _ in range(15):
            file = tmp_path / "t.json.gz"
            file.write_bytes(mutation(packed, draw))
            survives(file)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_sqlite(tmp_path: Path, seed: int) -> None:
    whole, draw = export(tmp_path / "whole.sqlite").read_bytes(), random.Random(seed)
    for mutation in (cut, flip_bits, insert):
        for _ in range(15):
            file = tmp_path / "t.sqlite"
            file.write_bytes(mutation(whole, draw))
            survives(file)


@pytest.mark.parametrize("seed", range(2))
def test_mutated_archive(tmp_path: Path, seed: int) -> None:
    whole, draw = (ASSETS / "dlrm_kineto.tar.gz").read_bytes(), random.Random(seed)
    unpacked = gzip.decompress(whole)[: 2**18]
    for mutation in (cut, flip_bits, insert):
        file = tmp_path / "t.tar"
        file.write_bytes(mutation(unpacked, draw))
        survives(file)
