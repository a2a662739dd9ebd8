"""Device time by kernel, and how much of it is matrix products.

Kernels are told apart by name. ``GEMM`` and ``NOT_GEMM`` are the rule; a row keeps the kernels it
was applied to, so that the share can be computed again.
"""

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.bench.timing import Call

GEMM = (
    r"gemm|nvjet|xmma|splitk",  # cuBLAS, CUTLASS (torch.grouped_mm), QuACK
    r"^triton_tem_",  # Inductor's templates of matrix products
    r"^moe_(up|rows|da|outer|router_fwd|router_bwd_d[xw])_kernel$",  # slipstream
    r"^_(scatter2scatter|groupXtY)",  # ScatterMoE
    r"^_fused_(up_proj_swiglu|down_proj)_kernel|^_moe_bwd_",  # Liger
)
NOT_GEMM = (r"prepare_grouped_gemm",)
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def kernel_ms(call: Call, device: torch.device, *, repetitions: int = 3) -> dict[str, float]:
    """Mean device time per call by kernel name, longest first. CUDA only."""
    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            call()
        torch.cuda.synchronize(device)
    # The trace file is the documented format; the profiler's own events count annotations as work.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    total: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            total[event["name"]] += event["dur"] / 1e3 / repetitions
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def is_gemm(kernel: str) -> bool:
    """Whether a kernel of this name is a matrix product."""
    if any(re.search(pattern, kernel, re.IGNORECASE) for pattern in NOT_GEMM):
        return False
    return any(re.search(pattern, kernel, re.IGNORECASE) for pattern in GEMM)


def share_not_gemm(kernels: dict[str, float]) -> float:
    """Share of the device time that is not matrix products."""
    total = sum(kernels.values())
    return sum(ms for name, ms in kernels.items() if not is_gemm(name)) / total if total else 0.0
