"""The first call of a layer in a fresh process with empty compiler caches, and the next shape.

``measure_first_call`` starts ``python -m slipstream.bench.first_call`` and reads its last line. The
clock starts when the device is ready and the inputs lie on it, before the peer's package is
imported.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from os import environ
from typing import Any

import torch

from slipstream.bench.moe_peers import PEERS, Layer
from slipstream.bench.moe_problem import MoeShape, Problem, make_problem

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR")
OTHER_TOKENS = 0.83


def measure_first_call(
    peer: str,
    shape: MoeShape,
    *,
    skew: float,
    dtype: torch.dtype,
    device: torch.device,
    limit_s: float,
) -> dict[str, Any]:
    """``cold_s`` and ``next_shape_s`` in seconds, or ``cold_failed`` with the reason."""
    request = {
        "peer": peer,
        "shape": asdict(shape),
        "skew": skew,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
    }
    command = [sys.executable, "-m", "slipstream.bench.first_call", json.dumps(request)]
    with tempfile.TemporaryDirectory() as empty:
        caches = {name: f"{empty}/{name}" for name in CACHES}
        try:
            done = subprocess.run(
                command,
                env=environ | caches,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=True,
            )
        except subprocess.TimeoutExpired:
            return {"cold_failed": f"not done after {limit_s:.0f} s"}
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
            return {"cold_failed": lines[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def first_call(request: dict[str, Any]) -> dict[str, float]:
    """In the fresh process: time the first call, then the first call of another token count."""
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    shape = MoeShape(**request["shape"])
    other = replace(shape, tokens=max(1, round(OTHER_TOKENS * shape.tokens)))
    problem, shorter = (
        make_problem(s, skew=request["skew"], dtype=dtype, device=device) for s in (shape, other)
    )
    build = PEERS[request["peer"]].build
    return {
        "cold_s": _seconds(problem, lambda: build(problem)),
        "next_shape_s": _seconds(shorter, lambda: build(shorter)),
    }


def _seconds(problem: Problem, build: Any) -> float:
    _wait(problem.device)
    begin = time.perf_counter()
    layer: Layer = build()
    torch.autograd.grad(layer.forward(), list(layer.leaves.values()), problem.dout_TD)
    _wait(problem.device)
    return round(time.perf_counter() - begin, 3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(first_call(json.loads(sys.argv[1]))))
