"""A small prepared corpus: the project's own source code."""

from pathlib import Path

import pytest

from slipstream.config import load
from slipstream.data import PrepareRequest, prepare_shards
from slipstream.train.config import RunConfig
from tests.train.runs import RECIPES, ROOT


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("corpus") / "source"
    prepare_shards(
        PrepareRequest(
            sources=(str(ROOT / "src" / "slipstream" / "ops"),),
            out=out,
            tokenizer="byte",
            val_fraction=0.1,
            workers=1,
        )
    )
    return out


@pytest.fixture
def moe_config(corpus: Path) -> RunConfig:
    return load(RunConfig, RECIPES / "moe.toml", [f"data.path={corpus}", "train.device=cpu"])


@pytest.fixture
def dense_config(corpus: Path) -> RunConfig:
    return load(RunConfig, RECIPES / "dense.toml", [f"data.path={corpus}", "train.device=cpu"])
