"""Checks at the public boundary of the ops: one line that names the argument and the fix."""

from typing import get_args

import torch

from slipstream.errors import ShapeError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def described(value: object) -> str:
    """The kind of an argument that is of the wrong kind, for an error."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def shape(op: str, name: str, tensor: torch.Tensor, *expected: int | None) -> None:
    """Raise unless ``tensor`` has these sizes (None: any), and no more."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{op}: {name} is {described(tensor)}, expected a tensor")
    sizes = tensor.shape
    fits = len(sizes) == len(expected)
    if fits:
        for want, have in zip(expected, sizes, strict=True):
            if want is not None and want != have:
                fits = False
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ShapeError(f"{op}: {name} has shape {tuple(sizes)}, expected ({wanted})")


def rows(op: str, name: str, tensor: torch.Tensor, expected: str) -> None:
    """Raise unless ``tensor`` holds floats and has a last dimension, as in ``expected``."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{op}: {name} is {described(tensor)}, expected a tensor")
    if tensor.dim() == 0:
        raise ShapeError(f"{op}: {name} is a scalar, expected {expected}")
    floating(op, **{name: tensor})


def floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise unless all given tensors hold floating-point numbers of 16 bits or more."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise ShapeError(
                f"{op}: {name} has dtype {tensor.dtype}, expected float64, float32, bfloat16 or "
                f"float16; cast it"
            )


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise unless all given tensors live on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len({*devices.values()}) > 1:
        placed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ShapeError(f"{op}: tensors are on different devices ({placed}); move them to one")


def choice(op: str, name: str, value: str, allowed: object) -> None:
    """Raise unless ``value`` is one of the strings of the Literal ``allowed``."""
    if value not in get_args(allowed):
        options = ", ".join(map(str, get_args(allowed)))
        raise ShapeError(f"{op}: {name} = {value!r}, expected one of {options}")


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype statistics and sums are kept in: fp32, or fp64 for fp64 input."""
    return torch.promote_types(tensor.dtype, torch.float32)
