"""Without Triton's interpreter, which takes minutes for all cases; a test asks for it by name."""

import pytest

from slipstream.ops import triton_support

_interpreting = triton_support.interpreting


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "interpreting", lambda: False)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, _plain: None) -> None:
    """Run Triton kernels on the CPU; skips the test where they cannot."""
    if not _interpreting():
        pytest.skip("needs TRITON_INTERPRET=1 and Triton")
    monkeypatch.setattr(triton_support, "interpreting", _interpreting)
