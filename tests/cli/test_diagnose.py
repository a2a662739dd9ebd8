"""``slipstream diagnose`` as a user types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report import traces
from tests.train.runs import RECIPES, slipstream


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(traces.write(tmp_path_factory.mktemp("one") / "job") / "rank0.json")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(traces.write(tmp_path_factory.mktemp("several") / "job", ranks=2))


def refused(*args: str) -> str:
    done = slipstream("diagnose", *args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_report_of_plain_lines(one: str) -> None:
    done = slipstream("diagnose", one)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "1. " in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_json_alone_is_on_stdout(job: str, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = slipstream("diagnose", job, "--json", "-o", str(out))
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["num_ranks"] == 2
    assert content["comparison"] is None
    assert done.stderr == f"page: {out}\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_same_command_prints_the_same(job: str) -> None:
    outputs = [slipstream("diagnose", job, "--json").stdout for _ in range(2)]
    assert outputs[0] == outputs[1]


def test_a_limit_that_is_passed_exits_with_1(one: str) -> None:
    share = 100 * 0.45 / 2.8
    loose, tight = (
        f"exposed_communication_pct={share + 1}",
        f"exposed_communication_pct={share - 1}",
    )
    assert slipstream("diagnose", one, "--fail-on", loose).returncode == 0
    done = slipstream("diagnose", one, "--fail-on", loose, "--fail-on", tight, "--json")
    assert done.returncode == 1
    assert done.stderr.startswith("failed: exposed_communication_pct = 16.07")
    assert len(json.loads(done.stdout)["failed"]) == 1
    assert slipstream("diagnose", one, "--fail-on", "busy_pct=99").returncode == 1
    assert slipstream("diagnose", one, "--fail-on", "busy_pct=50").returncode == 0


def test_a_slower_job_is_worse_and_can_fail(tmp_path: Path) -> None:
    before = str(traces.write(tmp_path / "before", steps=6))
    after = str(traces.write(tmp_path / "after", steps=6, slow=1.5))
    page = tmp_path / "change.html"
    done = slipstream("diagnose", "--compare", before, after, "--json", "-o", str(page))
    change = json.loads(done.stdout)["comparison"]
    assert change["verdict"] == "worse"
    assert change["changes"][0]["name"] == "step"
    assert change["changes"][0]["shift_ms"] == pytest.approx(0.5)
    assert "Worse: B (after) against A (before)" in page.read_text()
    text = slipstream("diagnose", "--compare", before, after).stdout
    assert text.startswith("worse: B (after) against A (before)\n")
    assert re.search(r"^step +1\.00 +1\.50 +\+0\.50 +\+50\.0 +worse$", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines()) <= 80
    limit = ("--fail-on", "step_change_pct=10")
    assert slipstream("diagnose", "--compare", before, after, *limit).returncode == 1
    assert slipstream("diagnose", "--compare", after, before, *limit).returncode == 0


def test_steps_of_the_same_length_are_inconclusive(tmp_path: Path) -> None:
    jobs = [str(traces.write(tmp_path / name, steps=4)) for name in ("a", "b")]
    done = slipstream("diagnose", "--compare", *jobs)
    assert done.stdout.startswith("inconclusive: ")


def test_a_profile_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    content = traces.profile()
    content["traceEvents"] = [e for e in content["traceEvents"] if e["cat"] == "cpu_op"]
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(content))
    page = tmp_path / "page.html"
    done = slipstream("diagnose", str(path), "-o", str(page))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "not judged: anything: " in said
    assert "no GPU kernels" in said
    assert "exposed communication" not in said
    assert "Traceback" not in done.stderr
    assert "no GPU kernels" in page.read_text()
    summary = json.loads(slipstream("diagnose", str(path), "--json").stdout)["summary"]
    assert summary["busy_pct"] is None
    assert summary["span_ms"] == 0


def test_a_recipe_is_profiled_and_diagnosed(corpus: Path, tmp_path: Path) -> None:
    done = slipstream(
        "diagnose", "--run", str(RECIPES / "dense.toml"), "--set", f"data.path={corpus}",
        "--steps", "2", "--keep", str(tmp_path / "traces"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["num_steps"] == 2
    assert (tmp_path / "traces" / "rank0.json.gz").exists()
    assert f"traces: {tmp_path / 'traces'}" in done.stderr


def test_what_a_user_gets_wrong(one: str, tmp_path: Path) -> None:
    assert "none.json: no such file" in refused(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text('{"traceEvents": [')
    assert "bad.json" in refused(str(tmp_path / "bad.json"))
    assert "did you mean idle_pct" in refused(one, "--fail-on", "idl_pct=3")
    assert "--fail-on 'idle_pct'" in refused(one, "--fail-on", "idle_pct")
    assert "step_change_pct" in refused(one, "--fail-on", "step_change_pct=3")
    assert "found TRACE and --compare" in refused(one, "--compare", one, one)
    assert "--set" in refused(one, "--set", "train.steps=3")
    assert "is a folder" in refused(one, "-o", str(tmp_path))
    assert "no folder" in refused(one, "-o", str(tmp_path / "none" / "report.html"))
    assert "--steps" in refused(one, "--steps", "3")
    assert "the same file as" in refused(one, one)


def test_a_page_never_takes_the_place_of_a_trace(one: str) -> None:
    before = Path(one).read_bytes()
    assert "end it in .html" in refused(one, "-o", one)
    assert Path(one).read_bytes() == before


def test_a_page_that_cannot_be_written(one: str, tmp_path: Path) -> None:
    loop = tmp_path / "page.html"
    loop.symlink_to(tmp_path / "none" / "page.html")
    assert "page.html: cannot be written" in refused(one, "-o", str(loop))


@pytest.mark.parametrize("columns", ["0", "1", "40"])
def test_a_terminal_of_odd_width(one: str, columns: str) -> None:
    command = [sys.executable, "-m", "slipstream", "diagnose", one]
    environment = os.environ | {"COLUMNS": columns}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "compute" in done.stdout


def test_a_closed_stdout(one: str) -> None:
    for path, code in ((one, 0), (one + ".none", 2)):
        command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "slipstream"]
        done = subprocess.run([*command, "diagnose", path], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
