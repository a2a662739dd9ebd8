"""Fixtures of the whole test tree."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Sums are then added in one order on every machine.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN or the largest integer: what a kernel forgets to write shows.

    On by default in PyTorch's deterministic mode.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
