import re
from pathlib import Path

import pytest

from slipstream.ops import dispatch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "moe.md"
CODE = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(CODE)))
def test_what_the_document_shows_runs(number):
    names = {}
    exec(compile(CODE[number], DOCUMENT.name, "exec"), names)
    for name in ("x_TD", "router_ED"):
        if name in names and names[name].requires_grad:
            assert names[name].grad.isfinite().all()


def test_the_implementations_it_lists_are_those_there_are():
    rows = re.findall(r"^\| `(\w+)` \| (`triton`.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    listed = {op: re.findall(r"`(\w+)`", names) for op, names in rows}
    assert listed == {op: dispatch.implementations(op) for op in listed}
    assert len(listed) == 4
