"""Small profiles with known times, as PyTorch's profiler writes them."""

import json
from pathlib import Path
from typing import Any

HOSTILE = "void <script>window.hacked = 1</script>\x1b[31m\u202e\"'&{{ 7 * 7 }}<float>(int)"
STEP_US = 1000


def profile(
    *, rank: int = 0, ranks: int = 1, steps: int = 3, late_us: int = 0, slow: float = 1.0
) -> dict[str, Any]:
    """A step: 300 us of GEMM, 100 us of a hostile name, 200 us of all-reduce (50 us of it beside a
    GEMM), a copy of 20 us. ``late_us`` moves the rank's work before the all-reduce."""
    events: list[dict[str, Any]] = []
    for step in range(steps):
        at = 1_000_000 + step * STEP_US * slow
        events.append(
            _event("user_annotation", f"ProfilerStep#{step + 1}", at, STEP_US * slow, tid=100)
        )
        launches = [
            ("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128", 50, 300, 7),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 400, 20, 7),
            ("kernel", HOSTILE, 430, 100, 7),
            ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", 600, 200, 20),
            ("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128", 750, 100, 7),
        ]
        for number, (kind, name, begin, lasts, stream) in enumerate(launches):
            late = late_us if begin < 600 or stream == 20 else 0
            link = step * 10 + number + 1
            call = {"correlation": link}
            host = at + 10 + number * 30
            events.append(_event("cpu_op", "aten::mm", host, 20, tid=100))
            events.append(_event("cuda_runtime", "cudaLaunchKernel", host + 5, 8, 100, call))
            where = {"device": rank, "stream": stream, "correlation": link}
            start, dur = at + (begin + late) * slow, (lasts - late * (stream == 20)) * slow
            events.append(_event(kind, name, start, dur, stream, where, pid=rank))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "traceEvents": events,
    }


def write(folder: Path, ranks: int = 1, **options: Any) -> Path:
    """A folder with the profile of every rank; the last of several is 100 us late."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        late = 100 if ranks > 1 and rank == ranks - 1 else 0
        content = profile(rank=rank, ranks=ranks, late_us=late, **options)
        (folder / f"rank{rank}.json").write_text(json.dumps(content))
    return folder


def _event(
    kind: str,
    name: str,
    ts: float,
    dur: float,
    tid: int,
    args: dict[str, Any] | None = None,
    pid: int = 1000,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args or {},
    }
