"""The public traces in ``assets``, read and counted once per test run."""

from functools import cache
from pathlib import Path

from slipstream.diagnose import JobAccount, account, read

ASSETS = Path(__file__).parent / "assets"
JOBS = {
    "dlrm": ("dlrm_kineto.tar.gz",),
    "sampled": ("sampled_rank-0.json.gz", "sampled_rank-1.json.gz"),
    "sampled_rank-0": ("sampled_rank-0.json.gz",),
    "sampled_rank-1": ("sampled_rank-1.json.gz",),
    "trace_diff_control": ("trace_diff_control.json.gz",),
    "trace_diff_test": ("trace_diff_test.json.gz",),
    "nccl_data": ("nccl_data.json.gz",),
    "resnet_act_checkpoint_mi300": ("resnet_act_checkpoint_mi300.json.gz",),
    "bert_small_h100": ("bert_small_h100.json.gz",),
    "torch_compile_triton": ("torch_compile_triton.json.gz",),
    "gpu_only_mi210": ("gpu_only_mi210.json.gz",),
    "alexnet_cuda_sync": ("alexnet_cuda_sync.json.gz",),
}


@cache
def counted(job: str) -> JobAccount:
    return account(read([ASSETS / name for name in JOBS[job]]))
