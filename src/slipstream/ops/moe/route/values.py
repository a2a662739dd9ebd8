"""Checks of values, made where looking at them does not make the host wait for a GPU.

On a CPU a bad value raises at once. On a GPU it is looked for only with SLIPSTREAM_CHECK_VALUES=1
in the environment, by an assertion on the device, which ends the process; without it the kernels
stay within bounds and the values spread to the loss. Compiled code is checked as on a GPU.
"""

import os

import torch

from slipstream.errors import ConfigError

ENVIRONMENT = "SLIPSTREAM_CHECK_VALUES"


def finite(op: str, name: str, tensor_TE: torch.Tensor) -> None:
    """Raise ConfigError (or assert, see above) unless all of a matrix is finite."""
    fine = "expected finite numbers; look for a diverged layer before it"
    if _at_once(tensor_TE):
        if not (finite_TE := tensor_TE.isfinite()).all():
            bad = (~finite_TE).nonzero()
            raise ConfigError(
                f"{op}: {name} has {len(bad)} values that are not finite, the first at "
                f"{tuple(bad[0].tolist())}; {fine}"
            )
    elif _on_device():
        torch._assert_async(tensor_TE.isfinite().all(), f"{op}: {name} is not finite; {fine}")


def not_negative(op: str, name: str, index: torch.Tensor) -> None:
    """Raise ConfigError (or assert, see above) if an index is negative."""
    fine = "expected 0 or more (the number of experts or more: a slot of no expert)"
    if _at_once(index):
        if index.numel() and (lowest := int(index.min())) < 0:
            raise ConfigError(f"{op}: {name} holds {lowest}, {fine}")
    elif _on_device():
        torch._assert_async((index >= 0).all(), f"{op}: {name} holds negative values, {fine}")


def edges(op: str, name: str, edges_E1: torch.Tensor, rows: int) -> None:
    """Raise ConfigError (or assert, see above) unless edges ascend from 0 to at most ``rows``."""
    fine = f"expected ascending row numbers from 0 to at most {rows}"
    if _at_once(edges_E1):
        found = edges_E1.tolist()
        if found[0] != 0 or found[-1] > rows or found != sorted(found):
            shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
            raise ConfigError(f"{op}: {name} = [{shown}], {fine}")
    elif _on_device():
        steps = torch.cat((edges_E1[:1], edges_E1.diff(), rows - edges_E1[-1:]))
        good = (steps >= 0).all() & (edges_E1[0] == 0)
        torch._assert_async(good, f"{op}: {name} does not ascend from 0, {fine}")


def _at_once(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _on_device() -> bool:
    return os.environ.get(ENVIRONMENT) == "1"


# What torch.compiler.assume_constant_result sets, without importing the compiler.
_on_device._dynamo_marked_constant = True  # type: ignore[attr-defined]
