"""Costs are measured afresh, and offload also moves small tensors."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "recompute"


@pytest.fixture(autouse=True)
def _offload_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.nn.offload.MIN_BYTES", 0)
