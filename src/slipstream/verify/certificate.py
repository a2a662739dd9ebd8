"""The certificate of a verification: what ran where, every figure, and the verdict, as JSON."""

import math
import platform
import shutil
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import slipstream
from slipstream.hw import describe
from slipstream.ops import triton_support
from slipstream.verify.budget import FACTOR, Figure
from slipstream.verify.run import Options, Row, passed

FORMAT = 1
PACKAGES = ("torch", "triton", "numpy")


def certificate(rows: list[Row], options: Options, device: torch.device) -> dict[str, Any]:
    """Everything about a verification as plain values; numbers that JSON lacks are strings."""
    return {
        "format": FORMAT,
        "verdict": "pass" if passed(rows) else "fail",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "slipstream": {"version": slipstream.__version__, "commit": _commit()},
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        },
        "platform": platform.platform(),
        "device": _device(device),
        "options": asdict(options),
        "budget": {"factor": FACTOR, "rounding_units": 1},
        "rows": [_row(row) for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "op": row.op,
        "implementation": row.implementation,
        "dtype": row.dtype,
        "verdict": row.verdict,
        "reason": row.reason,
        "cases": row.cases,
        "worst": _number(row.worst),
        "outcomes": [
            {
                "case": outcome.case,
                "check": outcome.check,
                "verdict": outcome.verdict,
                "detail": outcome.detail,
                "figures": [_figure(figure) for figure in outcome.figures],
            }
            for outcome in row.outcomes
        ],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "tensor": figure.tensor,
        "kind": figure.kind,
        "error": _number(figure.error),
        "allowed": _number(figure.allowed),
        "ratio": _number(figure.ratio),
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _device(device: torch.device) -> dict[str, Any]:
    info = describe(device)
    return {
        "type": device.type,
        "name": info.name,
        "capability": info.capability,
        "memory_bytes": info.memory_bytes,
        "driver": _driver(device),
        "triton_interpreter": device.type == "cpu" and triton_support.interpreting(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a checkout, marked where files differ from it; None for an installed wheel."""
    folder = Path(slipstream.__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--", "src")
    return f"{commit} with changes" if commit and changed else commit


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    wanted = ("--query-gpu=driver_version", "--format=csv,noheader")
    versions = _output("nvidia-smi", *wanted)
    return versions.splitlines()[0] if versions else None


def _output(*command: str) -> str | None:
    """What a command prints; None where it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
