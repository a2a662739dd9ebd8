"""Safetensors read and written piece by piece, so that a conversion never holds a whole model.

The safetensors library reads lazily but writes from a dict of whole tensors; the writer here takes
the header first and then the bytes as they come. Layout: 8 bytes length, JSON header, raw bytes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor about to be written."""

    name: str
    """Key in the file."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its dtype on disk."""
    pieces: Callable[[], Iterable[torch.Tensor]]
    """Tensors that, flattened and concatenated, are the values; any dtype and device."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, entries: Iterable[Entry]) -> None:
    """Write ``entries`` as one safetensors file, one piece in memory at a time."""
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header(ordered))
        for entry in ordered:
            written = 0
            for piece in entry.pieces():
                flat = piece.detach().to("cpu", entry.dtype).contiguous().reshape(-1)
                written += file.write(flat.view(torch.uint8).numpy().data)
            assert written == entry.num_bytes, f"{entry.name}: {written} bytes written"


def _header(entries: Sequence[Entry]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        if entry.dtype not in _CODES:
            allowed = ", ".join(str(dtype) for dtype in _CODES)
            raise CheckpointError(f"{entry.name}: dtype {entry.dtype} cannot be saved; {allowed}")
        end = start + entry.num_bytes
        table[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFiles:
    """The tensors of a folder: one safetensors file, or shards with an index. Read lazily."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
        if single.is_file():
            self._where = dict.fromkeys(self._open(WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        elif index.is_file():
            self._where = self._read_index(index)
        else:
            raise CheckpointError(
                f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE}; "
                "save the model as safetensors (other weight formats are not read)"
            )

    def names(self) -> set[str]:
        """Every tensor."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header; CheckpointError if it is not a plain float."""
        code = self._slice(name).get_dtype()
        if code not in DTYPES:
            raise CheckpointError(
                f"{self.source(name)}: {name} is {code}, expected one of {', '.join(DTYPES)}; "
                "quantised weights are not read, take the unquantised model"
            )
        return DTYPES[code]

    def get(self, name: str) -> torch.Tensor:
        """The values; backed by the file, so copy what outlives it."""
        return self._open(self._where[name]).get_tensor(name)

    def source(self, name: str) -> Path:
        """The file a tensor is in."""
        return self.folder / self._where[name]

    def _slice(self, name: str) -> Any:
        return self._open(self._where[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path}: missing shard; copy the whole model folder again")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: damaged or cut short ({error}); copy the file again"
                ) from None
        return self._files[file]

    def _read_index(self, path: Path) -> dict[str, str]:
        where = read_json(path).get("weight_map")
        inside: dict[str, set[str]] = {}
        if not isinstance(where, dict) or not where:
            raise CheckpointError(f"{path}: no weight_map; copy the file again")
        for name, file in where.items():
            if Path(str(file)).name != file:
                raise CheckpointError(f"{path}: {name} is in {file!r}, expected a file name")
            if file not in inside:
                inside[file] = set(self._open(file).keys())
            if name not in inside[file]:
                raise CheckpointError(f"{self.folder / file}: no tensor {name}, the index has it")
        return where


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError says what is wrong with it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; is this a model folder?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error}); copy the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object; copy the file again")
    return values
