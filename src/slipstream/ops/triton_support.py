"""Where the Triton kernels can run: CUDA devices since Ampere, or a CPU in Triton's interpreter."""

import functools
import os
from importlib.util import find_spec

import torch

from slipstream.ops.dispatch import Refusal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)
_PIP = "pip install 'triton>=3.6'"


def refusal(tensor: torch.Tensor, *, products: bool = True) -> Refusal | None:
    """Why Triton kernels cannot serve a call on ``tensor``; None where they can.

    ``products``: they multiply in its dtype or return it, not only read it.
    """
    if tensor.dtype not in DTYPES:
        return Refusal(reason=f"the kernels do not take {tensor.dtype}")
    if tensor.is_cuda:
        return _refuse_cuda(tensor.device.index or 0)
    if tensor.device.type != "cpu" or not interpreting():
        return Refusal(reason=f"the kernels do not run on a {tensor.device.type} device")
    if products and tensor.dtype == torch.bfloat16:
        return Refusal(reason="Triton's interpreter multiplies and rounds bfloat16 wrongly")
    return None


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own costs microseconds on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below ``n >= 1``."""
    return 1 << (n - 1).bit_length()


def interpreting() -> bool:
    """Whether Triton interprets kernels, so that they run on CPU tensors (TRITON_INTERPRET=1)."""
    return _interpreting()


@functools.cache
def _interpreting() -> bool:
    # Read once: the kernels are built for one way of running when they are first imported.
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def capability(device: torch.device) -> int:
    """Major * 10 + minor of a CUDA device."""
    return _facts(_index(device))[0]


def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has."""
    return _facts(_index(device))[1]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _facts(index: int) -> tuple[int, int]:
    # Asked for at every launch; PyTorch takes microseconds to answer.
    found = torch.cuda.get_device_properties(index)
    return found.major * 10 + found.minor, found.multi_processor_count


def _refuse_cuda(index: int) -> Refusal | None:
    return _refusal_of_device(index)


@functools.cache
def _refusal_of_device(index: int) -> Refusal | None:
    if find_spec("triton") is None:
        return Refusal(reason="Triton is not installed", remedy=_PIP)
    capability = torch.cuda.get_device_capability(index)
    if capability < CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, CAPABILITY))
        return Refusal(reason=f"compute capability {have}; the kernels need {need}")
    return None


# What torch.compiler.assume_constant_result sets, without importing the compiler. It does not see
# through a cache, so the marked functions are plain ones.
for _function in (interpreting, _refuse_cuda):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
