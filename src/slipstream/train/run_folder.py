"""The folder of a run: resolved config, metrics, events, checkpoints, tokenizer."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

from slipstream.config import to_toml
from slipstream.errors import ConfigError
from slipstream.train.checkpoint import Saved, find
from slipstream.train.config import RunConfig


class RunFolder:
    """Paths of a run and the rules for using a folder that already has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics = path / "config.toml", path / "metrics.jsonl"
        self.checkpoints, self.tokenizer = path / "checkpoints", path / "tokenizer.json"

    def is_used(self) -> bool:
        """Whether a run has been started here."""
        return self.config.exists() or self.metrics.exists() or self.checkpoints.exists()

    def check(self, *, resume: bool) -> None:
        """ConfigError if this folder cannot take the run."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--run-dir {self.path}: is a file; give a folder")
        if self.is_used() and not resume:
            raise ConfigError(
                f"--run-dir {self.path}: already holds a run; continue it with --resume or "
                "give another folder"
            )

    def latest(self) -> Saved | None:
        """The newest complete checkpoint."""
        found = find(self.checkpoints)
        return found[-1] if found else None

    def changed_since(self, config: RunConfig) -> list[str]:
        """Settings that differ from those the run was last started with."""
        if not self.config.exists():
            return []
        before = _flat(tomllib.loads(self.config.read_text(encoding="utf-8")))
        now = _flat(tomllib.loads(to_toml(config)))
        keys = sorted(before.keys() | now.keys())
        return [
            f"{key}: {before.get(key, 'unset')} -> {now.get(key, 'unset')}"
            for key in keys
            if before.get(key) != now.get(key)
        ]

    def start(self, config: RunConfig, tokenizer_file: Path | None) -> None:
        """Create the folder and write what the run was started with."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.config.write_text(to_toml(config), encoding="utf-8")
        for leftover in self.checkpoints.glob(".*.partial"):
            shutil.rmtree(leftover)
        if tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, self.tokenizer)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        flat.update(_flat(value, name + ".") if isinstance(value, dict) else {name: value})
    return flat
