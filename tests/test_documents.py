"""What the documents show runs, and what they name exists."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import VERBS
from tests.models.hf_models import save

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]


def test_the_readmes_python_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("qwen3_moe", tmp_path / "path" / "to" / "hf_model")
    text = (ROOT / "README.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    assert "torch.Size([8, 64])" in capsys.readouterr().out
    assert names["model"].config._experts_implementation == "slipstream"


@pytest.mark.parametrize("name", ["recompute", "verify"])
def test_the_python_of_documents_runs(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, f"{name}.md", "exec"), names)


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "train_loop.py"), run_name="__main__")
    losses = [float(x) for x in re.findall(r"([\d.]+) nats per byte", capsys.readouterr().out)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1


def test_the_hugging_face_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "optimize_hf.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"([\d.]+) nats per byte", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1
    optimized, restored = (
        float(x) for x in re.findall(r"([\d.]+) (?:optimized|restored)", printed)
    )
    assert abs(optimized - restored) < 1.5e-4, "more than a unit of the last digit printed"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_and_verbs_in_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (ROOT / name).parent.joinpath(path).exists(), path
    for path in re.findall(r"`?((?:recipes|tests|tools|benchmarks)/[\w/.-]+\.\w+)`?", text):
        assert (ROOT / path).exists(), path
    for verb in re.findall(r"^(?:slipstream) (\w+)", text, re.MULTILINE):
        assert verb in VERBS, verb


def test_the_pins_satisfy_the_project() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(d for extra in project["project"]["optional-dependencies"].values() for d in extra),
        *(d for group in project["dependency-groups"].values() for d in group),
    ]
    named = {re.match(r"[\w-]+", item).group().replace("-", "_").lower() for item in wanted}
    pinned = {name.replace("-", "_").lower() for name in pins}
    assert named - {"slipstream_train"} <= pinned
    assert pins["torch"] == "2.13.0"
