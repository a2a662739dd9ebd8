"""What a measured row says about where it was measured."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slipstream import __version__
from slipstream.hw import describe

COMMIT = "SLIPSTREAM_COMMIT"
"""Environment variable that names the commit of a source tree without its git folder."""


def environment(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, commit and date."""
    return {
        "device": describe(device).name,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.type == "cuda"
        else None,
        "slipstream": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": os.environ.get(COMMIT) or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def version(package: str) -> str | None:
    """Installed version of ``package``; None if it is not installed as a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    return _output("git", "-C", folder, "describe", "--always", "--dirty", "--exclude", "*")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split("\n")
    return lines[0].strip() or None
