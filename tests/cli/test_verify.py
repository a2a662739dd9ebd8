"""``slipstream verify`` as a user types it."""

import json
import re
from pathlib import Path

import pytest
import torch

from slipstream.ops.norm.reference import norm_reference
from tests.train.runs import slipstream
from tests.verify import broken
from tests.verify.broken import served_by

QUICK = ("verify", "--only", "norm", "--device", "cpu", "--quick")


def test_a_good_op_passes_with_a_table_and_a_certificate(tmp_path: Path) -> None:
    done = slipstream(*QUICK, "--json", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for dtype in ("bf16", "fp16", "fp32"):
        assert re.search(rf"norm +reference +{dtype} +\d+ +0\.\d\d +pass", done.stdout)
    assert re.search(r"all +all +all +skipped +torch.compile: left out by --quick", done.stdout)
    assert re.search(r"verdict: all pass \(\d+ rows, \d+ checks, \d+ rows skipped", done.stdout)
    target = tmp_path / "slipstream-verify.json"
    assert f"certificate: {target}" in done.stdout
    document = json.loads(target.read_text())
    assert document["verdict"] == "pass"
    assert document["slipstream"]["version"]
    assert {row["verdict"] for row in document["rows"]} == {"pass", "skipped"}
    assert all(row["reason"] for row in document["rows"] if row["verdict"] == "skipped")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (broken.wrong_gradient, "gradient of x: max error"),
        (broken.nan_for_a_single_token, "output 0: max error nan"),
        (broken.as_if_contiguous, "layout of "),
        (broken.raises, "RuntimeError: out of tiles"),
        (lambda x, *rest: norm_reference(x + torch.rand(()) * 1e-8, *rest), "two runs differ"),
    ],
    ids=["gradient", "nan", "layout", "raises", "noise"],
)
def test_a_wrong_implementation_exits_with_1_and_says_what(run, words, tmp_path: Path) -> None:
    target = tmp_path / "failed.json"
    with served_by("norm", run):
        done = slipstream(*QUICK, "--dtype", "fp32", "--json", str(target))
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAIL norm broken fp32")]
    assert any(words in line for line in lines)
    assert "verdict: 1 of 1 rows FAILED" in done.stdout
    assert json.loads(target.read_text())["verdict"] == "fail"


def test_nothing_verified_is_not_a_success() -> None:
    done = slipstream(*QUICK, "--dtype", "fp32", "--only", "rope")
    assert done.returncode == 0
    refuse = broken.refuses("not on this machine")
    with served_by("norm", norm_reference, refuse):
        done = slipstream(*QUICK, "--dtype", "fp32")
    assert done.returncode == 1
    assert "verdict: nothing could be verified" in done.stdout
    assert re.search(r"norm +broken +fp32 +skipped +not on this machine", done.stdout)


def test_lists_may_be_repeated_or_separated_by_commas() -> None:
    done = slipstream(*QUICK[:1], *QUICK[3:], "--only", "norm,rope", "--dtype", "fp32,bf16")
    assert done.returncode == 0
    rows = re.findall(r"^(\w+) +reference +(\w+) ", done.stdout, re.MULTILINE)
    assert rows == [("norm", "bf16"), ("norm", "fp32"), ("rope", "bf16"), ("rope", "fp32")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nrom"), "--only nrom: no such op or group; there are moe, activation, "),
        (("--dtype", "fp8"), "--dtype fp8: expected one of bf16, fp16, fp32"),
        (("--device", "tpu"), "--device tpu: expected cpu or cuda"),
        (("--json", "nowhere/c.json"), "there is no folder nowhere; make it first"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message) -> None:
    done = slipstream("verify", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stdout == ""


def test_cuda_without_a_gpu_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = slipstream("verify", "--device", "cuda")
    assert done.returncode == 2
    assert "--device cuda: PyTorch finds no GPU here" in done.stderr
