"""Run the trainer the way a user does, in another process."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from slipstream.cli import main

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "ci"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def arguments(recipe: str, corpus: Path, run_dir: Path, *extra: str) -> list[str]:
    return [
        "train",
        str(RECIPES / f"{recipe}.toml"),
        f"data.path={corpus}",
        *extra,
        "--run-dir",
        str(run_dir),
    ]


def slipstream(*args: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: an import of torch less for every test."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, sys.argv = sys.argv, ["slipstream", *args]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def torchrun(ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
    launcher = (*TORCHRUN, str(ranks))
    return subprocess.run(
        [sys.executable, *launcher, "-m", "slipstream", *args],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )


def start(*args: str, ranks: int = 1) -> subprocess.Popen[str]:
    launcher = (*TORCHRUN, str(ranks)) if ranks > 1 else ()
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "slipstream", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def stop_at_step(process: subprocess.Popen[str], run_dir: Path, step: int, how: int) -> None:
    """Send a signal once ``step`` is in the metrics."""
    while process.poll() is None:
        if any(r["step"] >= step for r in records(run_dir)):
            process.send_signal(how)
            break
    process.wait(timeout=120)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"


def records(run_dir: Path) -> list[dict]:
    """Complete records without what depends on the machine's speed."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [
        {key: value for key, value in json.loads(line).items() if key != "time"} for line in lines
    ]
