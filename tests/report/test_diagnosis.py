"""The report of a diagnosis in the terminal and as JSON, from profiles with known times."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.diagnose import account, read
from slipstream.diagnose.findings import find
from slipstream.report.diagnosis import View, gather, page, show, to_json
from slipstream.report.diagnosis.words import (
    data_size,
    evidence,
    microseconds,
    milliseconds,
    percent,
    printable,
    short_name,
)
from tests.report import traces
from tests.train.runs import ROOT

README_NUMBERS = (
    "span_ms",
    "busy_pct",
    "communication_ms",
    "overlap_pct",
    "exposed_communication_ms",
    "exposed_copies_ms",
    "idle_ms",
)


def diagnosed(folder: Path) -> View:
    counted = account(read([folder]))
    return gather(counted, find(counted))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> View:
    return diagnosed(traces.write(tmp_path_factory.mktemp("alone") / "one"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> View:
    return diagnosed(traces.write(tmp_path_factory.mktemp("pair") / "two", ranks=2))


def strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def printed(view: View, width: int, *, terminal: bool = False) -> str:
    out = io.StringIO()
    show(view, Console(file=out, width=width, force_terminal=terminal))
    return out.getvalue()


def test_json_has_the_known_times(alone: View) -> None:
    # Three steps of 1000 us, from the first kernel at 50 to the last end at 2850.
    content = strict(to_json(alone))
    summary = content["summary"]
    assert [summary[name] for name in README_NUMBERS] == pytest.approx(
        [2.8, 100 * 1.95 / 2.8, 0.6, 25.0, 0.45, 0.06, 2.8 - 1.95 - 0.06], rel=1e-12
    )
    assert summary["compute_ms"] == pytest.approx(1.5, rel=1e-12)
    assert summary["mean"] == {name: summary[name] for name in summary["mean"]}
    assert [step["step"] for step in content["steps"]] == [1, 2, 3]
    assert content["num_ranks"] == 1
    assert content["device"] == "NVIDIA H100 80GB HBM3"
    gemm = content["kernels"][0]
    assert (gemm["num"], gemm["total_ms"], gemm["mean_us"]) == (6, pytest.approx(1.2), 200)


def test_json_findings_have_what_a_program_needs(pair: View) -> None:
    found = strict(to_json(pair))["findings"]
    assert found
    for one in found:
        assert {"id", "evidence", "ms", "action", "per", "confidence"} <= set(one)
        assert one["ms"] >= 0
        assert len(one["action"]) > 20
    assert [one["id"] for one in found] == [one.id for one in pair.findings.findings]


def test_of_several_ranks_each_number_is_the_worst_ranks(pair: View) -> None:
    content = strict(to_json(pair))
    for name in README_NUMBERS:
        values = [rank[name] for rank in content["ranks"]]
        worst = min(values) if name in ("busy_pct", "overlap_pct") else max(values)
        assert content["summary"][name] == worst
        assert content["summary"]["mean"][name] == pytest.approx(sum(values) / 2)
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert content["summary"]["exposed_communication_ms"] > min(
        rank["exposed_communication_ms"] for rank in content["ranks"]
    )


def test_without_communication_the_overlap_is_null(tmp_path: Path) -> None:
    content = traces.profile(steps=2)
    events = content["traceEvents"]
    content["traceEvents"] = [event for event in events if "nccl" not in event["name"]]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    view = diagnosed(tmp_path / "trace.json")
    summary = strict(to_json(view))["summary"]
    assert summary["overlap_pct"] is None
    assert summary["mean"]["overlap_pct"] is None
    assert summary["communication_ms"] == 0
    assert " - " in printed(view, 80) or printed(view, 80).rstrip().splitlines()


def test_the_same_files_give_the_same_bytes(pair: View, tmp_path: Path) -> None:
    again = diagnosed(traces.write(tmp_path / "two", ranks=2))
    assert page(again) == page(pair)
    assert printed(again, 80) == printed(pair, 80)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_terminal_report_fits_its_width(width: int, pair: View) -> None:
    lines = printed(pair, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert "\x1b" not in "".join(lines)


def test_the_terminal_report_says_what_matters(pair: View) -> None:
    text = printed(pair, 80)
    assert text.startswith("two\n2 ranks, NVIDIA H100 80GB HBM3, 3 steps, 24 kernels\n")
    bars = [line for line in text.splitlines() if line.startswith("rank ") and "#" in line]
    assert len(bars) == 2
    assert all("=" in bar and "." in bar for bar in bars)
    for finding in pair.findings.findings:
        assert finding.id in text
    assert "PyTorch: " in text
    assert "worst" in text
    assert "mean" in text


def test_a_name_cannot_steer_the_terminal(pair: View) -> None:
    text = printed(pair, 80, terminal=True)
    assert "\x1b[31m\ufffd" not in text
    assert "\u202e" not in text
    assert "\u2588" in text


def test_the_bars_of_a_rank_add_up(pair: View) -> None:
    spans = [rank.numbers["span_with_copies_ms"] for rank in pair.ranks]
    bars = [line for line in printed(pair, 80).splitlines() if "#=" in line.replace("..", "")]
    for rank, span in zip(pair.ranks, spans, strict=True):
        parts = sum(rank.numbers[f"{part}_ms"] for part in ("compute", "idle"))
        parts += rank.numbers["exposed_communication_ms"] + rank.numbers["exposed_copies_ms"]
        assert parts == pytest.approx(span, rel=1e-12)
    assert len(bars) <= 2


def test_of_many_ranks_the_notable_are_shown(tmp_path: Path) -> None:
    view = diagnosed(traces.write(tmp_path / "many", ranks=12, steps=2))
    text = printed(view, 80)
    bars = [line for line in text.splitlines() if line.startswith("rank ") and "#" in line]
    assert len(bars) == 8
    assert bars[-1].startswith("rank 11"), "the slow rank is among them"
    assert "(4 more ranks in --json and -o)" in text
    assert len(strict(to_json(view))["ranks"]) == 12
    assert "8 of 12 ranks are shown" in page(view)


def test_the_documented_library_use_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces.write(tmp_path / "traces", ranks=2)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "diagnose.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "read(" in c]
    exec(compile(code, "docs/diagnose.md", "exec"), {})
    out = capsys.readouterr().out
    assert "traces/rank0.json 25.0 790000\ntraces/rank1.json 50.0 990000\n" in out
    assert "straggler" in out


def test_words() -> None:
    assert [milliseconds(v) for v in (None, 0.016, 12.54, 463.44, 12840.24, 2e5)] == [
        "-", "0.016 ms", "12.5 ms", "463 ms", "12.8 s", "200 s",
    ]  # fmt: skip
    assert microseconds(5.63) == "5.6 us"
    assert microseconds(4210) == "4.21 ms"
    assert percent(None) == "-"
    assert data_size(306_684_384) == "306.7 MB"
    assert evidence("overlap_pct", 22.22) == "overlap: 22.2 %"
    assert evidence("num_kernels", 1234) == "num kernels: 1,234"
    assert evidence("line", None) == "line: not known"
    assert evidence("ranks", ["1", "2"]) == "ranks: 1, 2"
    assert printable("a\x1b[31m\nb\ud800") == "a?[31m b?"
    assert short_name("void at::native::f<(g)1, int>(int, float)") == "f<(g)1, int>"
    assert short_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD (Pinned -> Device)"
    assert len(short_name("k" * 999)) == 160
