"""The corpus of the trainer's tests, and one finished run."""

from pathlib import Path

import pytest

from tests.train.conftest import corpus
from tests.train.runs import arguments, slipstream

__all__ = ["corpus"]


@pytest.fixture(scope="session")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    done = slipstream(*arguments("moe", corpus, folder, "track.to=['tensorboard']"))
    assert done.returncode == 0, done.stderr
    return folder
