"""The page of a diagnosis: self-contained, safe, and drawn without an error by a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slipstream.diagnose import account, read
from slipstream.diagnose.findings import find
from slipstream.report.diagnosis import gather, page
from slipstream.report.diagnosis.timeline import MAX_BOXES
from tests.report import traces
from tests.report.browser import browser, look

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOOK = """
const found = page.document, canvas = found.getElementById("timeline");
const readout = found.getElementById("timeline-readout"), root = found.documentElement;
const click = (name) => found.querySelector(`[data-zoom=${name}]`).click();
const whole = canvas.toDataURL();
click("in"); const zoomed = canvas.toDataURL();
click("left"); const moved = canvas.toDataURL();
click("all"); const again = canvas.toDataURL();
const edge = canvas.getBoundingClientRect(), texts = new Set();
for (let y = 2; y < edge.height; y += 6) for (let x = 1; x < edge.width; x += 3) {
  const at = { clientX: edge.left + x, clientY: edge.top + y, pointerId: 1 };
  canvas.dispatchEvent(new page.PointerEvent("pointermove", at));
  texts.add(readout.textContent);
}
const press = (key) => canvas.dispatchEvent(new page.KeyboardEvent("keydown", { key: key }));
press("+"); const keyed = canvas.toDataURL(); press("0");
const place = found.querySelector("[data-from]"); place.click();
const placed = canvas.toDataURL();
return { hacked: page.hacked === undefined ? "no" : "yes", wide: root.scrollWidth,
  frame: page.innerWidth, zooms: whole !== zoomed, moves: zoomed !== moved, keys: whole !== keyed,
  places: whole !== placed,
  returns: whole === again, texts: Array.from(texts) };
"""


class Checker(HTMLParser):
    """Collects what must hold of any page: balanced tags, single ids, no outside loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [v or "" for n, v in attrs if n in ("src", "href", "srcset", "action")]
        assert not [name for name in values if name.startswith("on")], "inline handler"
        if tag == "script":
            self.scripts.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = traces.write(tmp_path_factory.mktemp("traces") / "two", ranks=2)
    counted = account(read([folder]))
    return page(gather(counted, find(counted)))


def test_the_page_is_well_formed_and_loads_nothing(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.loads == ["data:,"]
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    assert "default-src 'none'" in text


def test_names_from_a_trace_are_never_markup(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert [script.get("type") for script in checker.scripts] == ["application/json", None]
    assert "window.hacked" in text
    assert "<script>window" not in text
    assert "49" not in re.findall(r"&#34;&#39;&amp;(\S+)", text)
    assert "\x1b" not in text


def test_the_timeline_holds_every_event_of_the_longest_step(text: str) -> None:
    (source,) = re.findall(r'id="timeline-data">(.*?)</script>', text)
    data = json.loads(source)
    lanes = {lane["where"]: lane["boxes"] for lane in data["lanes"]}
    assert {"rank 0, stream 7", "rank 0, stream 20", "rank 1, stream 7"} <= set(lanes)
    starts = lanes["rank 0, stream 7"][0::4]
    lengths = lanes["rank 0, stream 7"][1::4]
    assert lengths[:4] == [300_000, 20_000, 100_000, 100_000]
    assert [s - starts[0] for s in starts[:4]] == [0, 350_000, 380_000, 700_000]
    for boxes in lanes.values():
        pairs = zip(boxes[::4], boxes[1::4], strict=True)
        assert all(s >= 0 and s + d <= data["span_ns"] for s, d in pairs)


def test_the_script_parses(tmp_path: Path, text: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    path = tmp_path / "timeline.js"
    path.write_text(script)
    subprocess.run([node, "--check", path], check=True, capture_output=True)


@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_draws_it_without_a_complaint(width: int, text: str, tmp_path: Path) -> None:
    program = browser()
    if program is None:
        pytest.skip("needs Chromium (or its path in CHROMIUM)")
    seen = look(program, text, width, LOOK, tmp_path)
    assert seen.console == []
    assert seen.result["hacked"] == "no"
    assert seen.result["frame"] == width
    assert seen.result["wide"] <= width, "scrolls sideways"
    assert all(seen.result[name] for name in ("zooms", "moves", "keys", "places", "returns"))
    said = "\n".join(seen.result["texts"])
    assert "Memcpy HtoD (Pinned -> Device): 20.0 us" in said
    assert "rank 1, stream 20" in said


def test_a_page_stays_small_whatever_the_trace_holds(tmp_path: Path) -> None:
    content = traces.profile(steps=1)
    (model,) = [e for e in content["traceEvents"] if e["name"].startswith("Memcpy")]
    model |= {"cat": "kernel", "dur": 4, "args": {"stream": 7, "device": 0}}
    short = [model | {"name": f"k{n % 7}", "ts": 2e6 + 10 * n} for n in range(20_000)]
    long = short[0] | {"name": "the long one", "ts": 3e6, "dur": 5000}
    content["traceEvents"] = [*short, long]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    counted = account(read([tmp_path / "trace.json"]))
    (source,) = re.findall(
        r'id="timeline-data">(.*?)</script>', page(gather(counted, find(counted)))
    )
    data = json.loads(source)
    boxes = data["lanes"][1]["boxes"]
    assert 1000 < len(boxes) // 4 <= MAX_BOXES // 2
    assert boxes[0] == 0
    assert boxes[1] < 2 * data["span_ns"] / 1000, "no box hides where the others are"
    ends = [start + dur for start, dur in zip(boxes[::4], boxes[1::4], strict=True)]
    assert max(ends) == data["span_ns"]
    names = [data["names"][name] for name in boxes[3::4]]
    assert "the long one" in names
    assert "short ones drawn together" in " ".join(names)


@pytest.mark.parametrize("kinds", [("kernel",), ("gpu_memcpy",), ("cuda_runtime",), ()])
def test_a_page_of_hardly_anything(kinds: tuple[str, ...], tmp_path: Path) -> None:
    content = traces.profile(steps=1)
    events = [e | {"dur": 0} for e in content["traceEvents"] if e["cat"] in kinds][:1]
    events.append(content["traceEvents"][0] | {"cat": "cpu_op", "name": "aten::mm"})
    content["traceEvents"] = events
    (tmp_path / "trace.json").write_text(json.dumps(content))
    counted = account(read([tmp_path / "trace.json"]))
    checker = Checker()
    checker.feed(page(gather(counted, find(counted))))
    assert checker.open == []


def test_a_page_stays_small_whatever_the_names(tmp_path: Path) -> None:
    content = traces.profile(steps=1)
    for event in content["traceEvents"]:
        if event["cat"] == "kernel":
            event["name"] += "<" + "a" * 300_000
    (tmp_path / "trace.json").write_text(json.dumps(content))
    counted = account(read([tmp_path / "trace.json"]))
    assert len(page(gather(counted, find(counted)))) < 200_000
