"""Fixtures of the whole test tree."""

import signal
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/ops --device cuda`` holds the ops to the same budgets on a GPU."""
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are, and say so."""
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if "multi_gpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))


@pytest.fixture(scope="session", autouse=True)
def _heed_ctrl_c() -> None:
    # Started in the background by a shell, tests would hand an ignored SIGINT on to what they run.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
