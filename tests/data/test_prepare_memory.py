"""Peak memory does not grow with the size of the input.

VmHWM, not ru_maxrss: that one starts at the peak of the process that forked this one.
"""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import sys
from pathlib import Path
from slipstream.data import PrepareRequest, prepare_shards
source, out = map(Path, sys.argv[1:])
request = PrepareRequest(sources=(str(source),), out=out, tokenizer="byte", workers=1)
summary = prepare_shards(request)
status = Path("/proc/self/status").read_text()
print(summary.text_bytes, status.partition("VmHWM:")[2].split()[0])
"""


def peak_mib(source, out):
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(source), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    text_bytes, peak_kib = map(int, result.stdout.split())
    return text_bytes, peak_kib / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_100_mb_take_hardly_more_memory_than_8(tmp_path, words, kind):
    block = words(100_000).encode()
    if kind == "jsonl":
        block = (json.dumps({"text": block.decode()}) + "\n").encode()
    small, large = tmp_path / f"small.{kind}", tmp_path / f"large.{kind}"
    small.write_bytes(block * (8_000_000 // len(block)))
    large.write_bytes(block * (100_000_000 // len(block)))
    _, before = peak_mib(small, tmp_path / "a")
    text_bytes, after = peak_mib(large, tmp_path / "b")
    os.remove(large)
    assert text_bytes > 50_000_000
    assert after < 200
    assert after - before < 24
