"""Launches and descriptors with little host time: twenty launches a layer add up.

Triton specialises a kernel on what every argument is like and finds that out in Python at every
launch. What a launch returns, the compiled kernel, can be called again itself: here it is kept
for calls that Triton cannot tell apart. All others are launched as usual: arguments of a kind or
at an address that kernels seldom get, ROCm, where Triton looks at more, and the interpreter.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.ops import ahead
from slipstream.ops.triton_support import interpreting

ALIGNMENT = 16
"""Triton asks whether addresses, in bytes, and integers are multiples of it."""
_INT32 = 2**31
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
"""By ``_key``: what was compiled, the constants behind the arguments, in order, and the kernel."""


class Descriptor(TensorDescriptor):
    """A descriptor whose shape, strides and address its maker has seen to."""

    def __post_init__(self) -> None:
        """Check nothing: what Triton checks here takes longer than all else about a descriptor."""


def launch(
    kernel: Any, grid: tuple[int] | tuple[int, int], /, *args: Any, **constants: Any
) -> None:
    """``kernel[grid](*args, **constants)`` of a jitted function, on the current device and stream.

    ``args``: all arguments that are no constants, which come first; ``constants``: the others, and
    Triton's options. In a dry run the call is only noted: see ``ahead``.
    """
    key = _key(kernel, args, constants)
    if ahead.local.calls is not None:
        if key is not None:
            # What Triton's cache on disk knows a kernel by depends on which ones it hashed before:
            # do that in the order of launches, as without a dry run.
            hash(kernel)
            ahead.local.calls.append(ahead.Call(key, kernel, args, constants))
        return
    if key is None:
        kernel[grid](*args, **constants)
        return
    found = _COMPILED.get(key) or _first(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        _keep(key, kernel, compiled, args, constants)
        return
    compiled, behind, _ = found
    all_three = (*grid, 1, 1)[:3]
    if _watched(knobs.runtime.launch_enter_hook) or _watched(knobs.runtime.launch_exit_hook):
        compiled[all_three](*args, *behind)
        return
    # Without its hooks Triton need not be told about this launch, which is half of its time.
    stream = driver.active.get_current_stream(key[1])
    compiled.run(
        *all_three, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *args, *behind,
    )  # fmt: skip


def _watched(hook: Any) -> bool:
    return getattr(hook, "calls", True) != []


def _key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...] | None:
    """At least what Triton tells calls apart by: equal keys, same compiled kernel. None: unusual.

    The device is the current one: it is where Triton launches.
    """
    if interpreting() or torch.version.hip is not None:
        return None
    if kernel.pre_run_hooks or knobs.runtime.add_stages_inspection_hook is not None:
        return None
    key = [
        id(kernel), torch.cuda.current_device(), (*constants,), (*constants.values(),),
        knobs.runtime.debug, knobs.compilation.instrumentation_mode,
    ]  # fmt: skip
    addresses = 0
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            addresses |= arg.data_ptr()
            key.append(arg.dtype)
        elif arg is None:
            key.append(None)
        elif kind is int and -_INT32 <= arg < _INT32:
            key.append("one" if arg == 1 else arg % ALIGNMENT == 0)
        elif kind is float:
            key.append(float)
        elif kind is Descriptor:
            key += arg.base.dtype, (*arg.block_shape,)
        else:
            return None
    return None if addresses % ALIGNMENT else tuple(key)


def _first(key: tuple[Any, ...]) -> Any:
    """What ``_COMPILED`` has for ``key`` once it is compiled ahead; None if it is not."""
    if ahead.local.plan is not None:
        driver.active.get_current_target()  # makes the driver, which threads must not do at once
        ahead.prepare(_COMPILED, _compile)
    ahead.wait_for(key)
    return _COMPILED.get(key)


def _compile(call: ahead.Call) -> None:
    compiled = call.kernel.warmup(*call.args, grid=(1,), **call.constants)
    if compiled is not None:
        compiled[1, 1, 1]  # builds the launcher and loads the kernel, which also takes its time
    _keep(call.key, call.kernel, compiled, call.args, call.constants)


def _keep(
    key: tuple[Any, ...],
    kernel: Any,
    compiled: Any,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Keep what Triton compiled; a hook can keep it from compiling."""
    if hasattr(compiled, "result"):  # of triton.AsyncCompileMode
        compiled = compiled.result()
    if compiled is not None:
        # The key has the kernel's address: as long as it is here, no other kernel has it.
        _COMPILED[key] = compiled, _behind(kernel, len(args), constants), kernel


def _behind(kernel: Any, num_args: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    """The constants in the order in which the kernel takes them."""
    if any(p.is_constexpr != (i >= num_args) for i, p in enumerate(kernel.params)):
        raise AssertionError(f"{kernel.__name__}: constants come last, by name; all else by place")
    parameters = [*inspect.signature(kernel.fn).parameters.values()][num_args:]
    return tuple(constants.get(p.name, p.default) for p in parameters)
