"""What a user gets wrong: one clear line, exit code 2, nothing half-written."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slipstream.data import PrepareRequest, prepare_shards
from slipstream.train.checkpoint import find
from tests.train.runs import RECIPES, ROOT, environment, slipstream

MOE = str(RECIPES / "moe.toml")


def refused(*args: str) -> str:
    """The one line of a refusal."""
    done = slipstream(*args)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stdout + done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.stpes=3"], ["train.stpes", "train.steps"]),
        (["train.steps=x"], ["train.steps = 'x'", "integer"]),
        (["model.num_heads=5"], ["d_model = 32", "num_heads = 5"]),
        (["model.moe.top_k=5"], ["top_k = 5", "num_experts = 4"]),
        (["model.vocab_size=100"], ["model.vocab_size = 100", "257", "model.vocab_size=257"]),
        (["train.micro_batch=3"], ["train.micro_batch = 3", "8 sequences"]),
        (["data.path=nowhere"], ["nowhere", "slipstream prepare"]),
        (["train.device=cuda"], ["train.device = cuda", "cpu or auto"]),
        (["recompute.budget_gib=1"], ["recompute.budget_gib = 1"]),
        (["train.init_from=nowhere"], ["nowhere"]),
        (["data.seq_len=64", "model.max_seq_len=32"], ["data.seq_len = 64", "max_seq_len = 32"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_train_refuses_before_writing(
    overrides: list[str], parts: list[str], corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    line = refused("train", MOE, f"data.path={corpus}", *overrides, "--run-dir", str(run))
    for part in parts:
        assert part in line
    assert not run.exists()


def test_no_data_path(tmp_path: Path) -> None:
    line = refused("train", MOE, "--run-dir", str(tmp_path / "run"))
    assert "data.path is required" in line


def test_missing_recipe(tmp_path: Path) -> None:
    assert "none.toml: no such recipe" in refused("train", str(tmp_path / "none.toml"))


@pytest.fixture
def copied(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus, tmp_path / "set"))


def truncate(folder: Path) -> None:
    shard = folder / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])


def corrupt(folder: Path) -> None:
    shard = folder / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, corrupt], ids=["truncated", "corrupt"])
def test_a_damaged_shard(damage: Callable[[Path], None], copied: Path, tmp_path: Path) -> None:
    damage(copied)
    line = refused("train", MOE, f"data.path={copied}", "--run-dir", str(tmp_path / "run"))
    assert "train-00000.bin" in line
    assert "slipstream prepare" in line
    assert not (tmp_path / "run").exists()


def test_raw_shards_with_a_token_past_the_vocabulary(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 20000).astype(np.uint16)
    tokens[100:] += 300
    tokens.tofile(tmp_path / "train.bin")
    line = refused(
        "train", MOE, f"data.path={tmp_path}", "eval.every=0", "--run-dir", str(tmp_path / "run")
    )
    assert "model.vocab_size is 257; raise model.vocab_size" in line


def test_a_used_run_folder(run: Path, corpus: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    line = refused("train", MOE, f"data.path={corpus}", "--run-dir", str(run))
    assert str(run) in line
    assert "--resume" in line
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_run_folder_that_is_a_file(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    line = refused("train", MOE, f"data.path={corpus}", "--run-dir", str(tmp_path / "run"))
    assert "is a file" in line
    assert (tmp_path / "run").read_text() == "mine"


def test_a_checkpoint_of_another_model(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    line = refused(
        "train", MOE, f"data.path={corpus}", "model.d_model=64", "--run-dir", str(copy), "--resume"
    )
    assert "model.d_model is 32 there and 64 here" in line


def test_a_truncated_checkpoint(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    file = find(copy / "checkpoints")[-1].path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    for verb in (
        ("train", MOE, f"data.path={corpus}", "--run-dir", str(copy), "--resume"),
        ("sample", str(copy)),
        ("export", str(copy), "--to", str(tmp_path / "hf")),
    ):
        line = refused(*verb)
        assert "__0_0.distcp" in line
        assert "delete" in line
    assert not (tmp_path / "hf").exists()


def test_shards_of_another_tokenizer_on_resume(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    other = tmp_path / "other"
    prepare_shards(
        PrepareRequest(
            sources=(str(ROOT / "src" / "slipstream" / "ops"),),
            out=other,
            tokenizer="train:257",
            workers=1,
        )
    )
    line = refused("train", MOE, f"data.path={other}", "--run-dir", str(copy), "--resume")
    assert "tokenizer" in line
    assert str(other) in line


@pytest.mark.parametrize("verb", ["sample", "report", "export"])
def test_a_folder_that_is_no_run(verb: str, tmp_path: Path) -> None:
    extra = ("--to", str(tmp_path / "out")) if verb == "export" else ()
    line = refused(verb, str(tmp_path / "none"), *extra)
    assert "none" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["set", "set/runs/mine", "file/run"])
def test_a_run_folder_where_none_can_be(place: str, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    run = tmp_path / place
    for extra in ((), ("--resume",)):
        line = refused("train", MOE, f"data.path={copied}", "--run-dir", str(run), *extra)
        assert f"--run-dir {run}: " in line
        assert "give another folder" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_flipped_bit_in_a_checkpoint(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    file = find(copy / "checkpoints")[-1].path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    longer = ("train.steps=20", "--resume")
    for verb in (
        ("train", MOE, f"data.path={corpus}", "--run-dir", str(copy), *longer),
        ("sample", str(copy)),
        ("export", str(copy), "--to", str(tmp_path / "hf")),
    ):
        line = refused(*verb)
        assert f"{file}: is not what was written" in line
        assert "delete" in line
    assert not (tmp_path / "hf").exists()


def test_a_damaged_line_of_metrics(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    metrics = copy / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    before = metrics.read_bytes()
    for verb in (
        ("train", MOE, f"data.path={corpus}", "--run-dir", str(copy), "--resume"),
        ("report", str(copy)),
    ):
        assert f"{metrics}: line 2 is not JSON" in refused(*verb)
    assert metrics.read_bytes() == before


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[[["], ids=["not-utf8", "not-json"])
def test_a_damaged_tokenizer_file(content: bytes, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "tokenizer.json").write_bytes(content)
    assert str(copy) in refused("sample", str(copy))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("below.txt/loss.svg", "could not be written"),
        ("none/loss.svg", "could not be written"),
        ("loss.doc", "end its name in .svg or .png"),
        ("loss", "end its name in .svg or .png"),
    ],
)
def test_a_figure_that_cannot_be_written_costs_only_the_figure(
    name: str, part: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "below.txt").write_text("mine")
    done = slipstream("report", str(run), "--figure", str(tmp_path / name))
    assert done.returncode == 2
    assert "tokens/s" in done.stdout
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / name) in line
    assert part in line


def test_a_report_of_a_read_only_run_prints_its_table(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure

    def read_only(_: object, out: Path) -> None:
        raise OSError(30, "Read-only file system", str(out))

    monkeypatch.setattr(figure, "savefig", read_only)
    done = slipstream("report", str(run))
    assert done.returncode == 2
    assert "tokens/s" in done.stdout
    (line,) = done.stderr.splitlines()
    assert f"{run / 'loss.svg'}: the loss curve could not be written: Read-only" in line
    assert "--figure" in line


def test_an_empty_prompt_and_a_wrong_temperature(run: Path) -> None:
    assert "--prompt is empty" in refused("sample", str(run), "--prompt", "")
    assert "--temperature" in refused("sample", str(run), "--temperature", "-1")
    assert "--checkpoint" in refused("sample", str(run), "--checkpoint", "first")


def test_a_file_size_limit_ends_training_in_one_line(corpus: Path, tmp_path: Path) -> None:
    # The disk is as good as full: no file of more than 40 blocks can be written.
    run = tmp_path / "run"
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40960, 40960)); "
        "from slipstream.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "train", MOE, f"data.path={corpus}", "--run-dir", str(run)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert "step_00000003" in lines[0]
    assert "could not be written" in lines[0]
    assert not list((run / "checkpoints").iterdir())


def test_a_validation_split_shorter_than_a_sequence(tmp_path: Path) -> None:
    np.zeros(20000, np.uint16).tofile(tmp_path / "train.bin")
    np.zeros(20, np.uint16).tofile(tmp_path / "val.bin")
    run = tmp_path / "run"
    line = refused("train", MOE, f"data.path={tmp_path}", "--run-dir", str(run))
    for part in ("validation split has 20 tokens", "data.seq_len = 32", "--val-fraction"):
        assert part in line
    assert not run.exists()
