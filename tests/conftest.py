"""Fixtures of the whole test tree."""

import os
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

# Without a GPU, tests of the ops run Triton's kernels interpreted. Whichever test imports a kernel
# first, it is built to be interpreted, whatever the environment says by then.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        knobs = import_module("triton.knobs")
        knobs.runtime.interpret = os.environ["TRITON_INTERPRET"] == "1"

INTERPRETED = {"ops", "verify"}
"""Folders whose tests may interpret kernels; it is slow, and elsewhere not what is tested."""
PLAIN = pytest.MonkeyPatch()


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Interpret nothing outside ``INTERPRETED``: not in a process it starts, nor in any fixture.

    A fixture of this would come too late for those that live longer than a test.
    """
    PLAIN.undo()
    if item.path.parent.name not in INTERPRETED:
        PLAIN.delenv("TRITON_INTERPRET", raising=False)
        PLAIN.setattr("slipstream.ops.triton_support.interpreting", lambda: False)


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
