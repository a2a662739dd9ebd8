"""Where the op tests run: ``--device``."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device")
    # Even "cpu" would install a mode that the compiler has to trace through.
    torch.set_default_device(None if device == "cpu" else device)
    yield
    torch.set_default_device(None)
