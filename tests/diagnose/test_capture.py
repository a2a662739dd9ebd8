"""Recording steps of our own trainer, on the CPU."""

from pathlib import Path

import pytest

from slipstream.data import PrepareRequest, prepare_shards
from slipstream.diagnose import account, read
from slipstream.diagnose.capture import capture
from slipstream.diagnose.findings import find
from slipstream.diagnose.trace import Kind, Trace
from slipstream.errors import ConfigError
from slipstream.train import load_run_config, train

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "ci" / "dense.toml"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = tmp_path_factory.mktemp("corpus") / "source"
    prepare_shards(
        PrepareRequest(
            sources=(str(ROOT / "src" / "slipstream" / "config"),),
            out=corpus,
            tokenizer="byte",
            val_fraction=0.1,
            workers=1,
        )
    )
    return [f"data.path={corpus}", "train.device=cpu"]


@pytest.fixture(scope="module")
def captured(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    return capture(RECIPE, overrides, steps=2, out_dir=folder / "traces", warm_up=2)


@pytest.fixture(scope="module")
def trace(captured: Path) -> Trace:
    return read([captured]).traces[0]


def names(trace: Trace, kind: Kind) -> list[str]:
    return [trace.name_of(row) for row in trace.of_kind(kind).tolist()]


def test_only_the_trace_is_left(captured: Path) -> None:
    assert [path.name for path in captured.parent.iterdir()] == ["rank0.json.gz"]


def test_steps_after_the_warm_up(trace: Trace) -> None:
    steps = [name for name in names(trace, Kind.ANNOTATION) if name.startswith("ProfilerStep#")]
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"]


@pytest.mark.parametrize("phase", ["load_batch", "data", "forward", "backward", "optimizer"])
def test_phases_are_ranges(trace: Trace, phase: str) -> None:
    assert names(trace, Kind.ANNOTATION).count(f"## {phase} ##") >= 2


def test_shapes_are_recorded(trace: Trace) -> None:
    rows = trace.of_kind(Kind.CPU_OP).tolist()
    products = [row for row in rows if trace.name_of(row) == "aten::mm"]
    assert all(trace.args(row)["Input Dims"][0] for row in products)
    assert products


def test_a_trace_without_gpu_is_not_judged(captured: Path) -> None:
    found = find(account(read([captured])))
    assert found.findings == ()
    assert "operators of the host but no GPU kernels" in found.abstained[0].reason


@pytest.mark.parametrize(("steps", "warm_up"), [(0, 2), (2, 0), (-1, 1)])
def test_refused(tmp_path: Path, steps: int, warm_up: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        capture(RECIPE, [], steps=steps, warm_up=warm_up, out_dir=tmp_path / "traces")
    assert not (tmp_path / "traces").exists()


def test_a_run_can_end_unsaved(overrides: list[str], tmp_path: Path) -> None:
    calls: list[int] = []

    def after_step() -> bool:
        calls.append(len(calls))
        return len(calls) == 3

    train(load_run_config(RECIPE, [*overrides, "eval.every=0"]), tmp_path, after_step=after_step)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert not list(tmp_path.glob("checkpoints/*"))
