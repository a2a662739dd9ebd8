"""What ``slipstream env`` prints: versions, devices, implementations and a verdict."""

import platform
import sys
from importlib import metadata

import torch

from slipstream import __version__
from slipstream.hw import describe
from slipstream.nn.attention import backend_order
from slipstream.ops import dispatch

REQUIRED = (
    "torch",
    "jinja2",
    "numpy",
    "orjson",
    "pydantic",
    "rich",
    "safetensors",
    "tomli-w",
    "typer",
)
OPTIONAL = {
    "triton": None,
    "transformers": "hf",
    "tokenizers": "data",
    "pyarrow": "data",
    "zstandard": "data",
    "datasets": "data",
    "tensorboard": "track",
    "wandb": "track",
    "trackio": "track",
    "matplotlib": "report",
}
TESTED_TORCH = ("2.11", "2.13")


def show(dtype: str) -> None:
    """Print it all; ``dtype`` is bf16, fp32 or auto."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = _dtype(dtype, device)
    warnings = [*_versions(), *_devices()]
    print(f"\nimplementations ({device.type}, {str(chosen).removeprefix('torch.')})")
    for op in dispatch.ops():
        choice = dispatch.explain(op, device, chosen)
        reasons = "; ".join(
            f"not {name}: {refusal.reason}" + (f" ({refusal.remedy})" if refusal.remedy else "")
            for name, refusal in choice.passed_over
        )
        if dispatch.implementations(op) == ["reference"]:
            reasons = "plain PyTorch; this version has nothing faster for it"
        print(f"  {op:22} {choice.used:12} {reasons}".rstrip())
        warnings += [f"{op}: {r.remedy}" for _, r in choice.passed_over if r.remedy]
    order = ", ".join(
        b.name.removesuffix("_ATTENTION").lower() for b in backend_order(device, chosen)
    )
    print(f"  {'attention':22} PyTorch SDPA, in this order: {order}")
    print("\nverdict: " + ("; ".join(warnings) if warnings else "everything needed is here"))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def _versions() -> list[str]:
    print(f"slipstream {__version__}, Python {sys.version.split()[0]}, {platform.platform()}")
    print("  " + ", ".join(f"{name} {_version(name) or 'MISSING'}" for name in REQUIRED))
    found = {name: _version(name) for name in OPTIONAL}
    print("  optional: " + ", ".join(f"{n} {v}" for n, v in found.items() if v))
    absent = [f"{n} [{OPTIONAL[n]}]" if OPTIONAL[n] else n for n, v in found.items() if not v]
    if absent:
        print("  not installed: " + ", ".join(absent))
    missing = [f"{name} is missing" for name in REQUIRED if _version(name) is None]
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor in TESTED_TORCH:
        return missing
    return [*missing, f"torch {minor} is not among the tested versions ({', '.join(TESTED_TORCH)})"]


def _devices() -> list[str]:
    print(f"  cpu: {describe(torch.device('cpu')).name}")
    if not torch.cuda.is_available():
        reason = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no driver"
        print(f"  cuda: none ({reason})")
        return []
    warnings = []
    for index in range(torch.cuda.device_count()):
        info = describe(torch.device("cuda", index))
        major, minor = info.capability or (0, 0)
        memory = (info.memory_bytes or 0) / 2**30
        peak = "peak unknown, so no MFU"
        if info.spec is not None:
            peak = f"bf16 peak {info.spec.bf16_flops / 1e12:.0f} TFLOP/s ({info.spec.source})"
        print(f"  cuda:{index}: {info.name}, sm_{major}{minor}, {memory:.0f} GiB, {peak}")
        if (major, minor) < (8, 0):
            warnings.append(f"cuda:{index} has compute capability {major}.{minor}; 8.0 is needed")
    print(f"  CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    return warnings


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
