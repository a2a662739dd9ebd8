"""Whether kernels are limited by arithmetic or by memory, and how near they are to that limit.

FLOPs and bytes come from the shapes of the operators that launched the kernels, so they are what
the operator needs at least: inputs read once, output written once. Peaks are published ones
(``slipstream.hw.specs``); for a device that is not listed, nothing is said about the limit.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from slipstream.diagnose.classify import MEMORY_BOUND, KernelClass
from slipstream.diagnose.figures import Account
from slipstream.diagnose.operators import operators_of
from slipstream.diagnose.trace import Kind
from slipstream.hw import DeviceSpec, spec_of

_BYTES = {
    "double": 8,
    "float": 4,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
    "long": 8,
    "long int": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
_MAX_ELEMENTS = 1 << 60
"""No tensor is larger, whatever a damaged file says."""
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_grouped_mm": (0, 1),
    "aten::_int_mm": (0, 1),
}
"""Positions of the two matrices among an operator's inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator has to do."""

    flops: float
    """Multiplications and additions; 0 if only memory counts."""
    bytes: float
    """Inputs once, output once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRoof:
    """One operator and the kernels it launched."""

    operator: int
    """Its index in the trace."""
    kernel: int
    """Its longest kernel."""
    klass: KernelClass
    """Class of that kernel."""
    dur_ns: int
    """Sum over its kernels."""
    work: Work
    """What it has to do."""
    is_memory_bound: bool
    """Moving its bytes takes longer than its arithmetic at the peak rates."""
    ideal_ns: float
    """The longer of the two."""

    @property
    def attained_pct(self) -> float:
        """Share of the limiting peak reached."""
        return 100.0 * self.ideal_ns / self.dur_ns if self.dur_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The operators of one trace whose shapes are known."""

    spec: DeviceSpec | None
    """Peaks; None for an unknown device, and then there are no operators."""
    operators: tuple[OperatorRoof, ...]
    """In order of time."""
    kernels_ns: int
    """Time of all compute kernels, for the share that is covered."""
    problem: str | None
    """Why there are no operators; None if there are."""

    @property
    def covered_pct(self) -> float:
        """Share of the compute kernels' time that is judged."""
        judged = sum(one.dur_ns for one in self.operators)
        return 100.0 * judged / self.kernels_ns if self.kernels_ns else 0.0


def roofline(counted: Account) -> Roofline:
    """Judge the compute kernels of a trace."""
    trace = counted.trace
    kernels = trace.of_kind(Kind.KERNEL)
    compute = np.array([not info.is_communication for info in counted.infos], dtype=bool)
    kernels = kernels[compute[trace.name[kernels]]]
    total = int(trace.dur_ns[kernels].sum())
    spec = spec_of(trace.device_name) if trace.device_name else None
    rows: tuple[OperatorRoof, ...] = ()
    if spec is None:
        name = trace.device_name or "a device the trace does not name"
        problem: str | None = f"the peaks of {name} are unknown"
    else:
        rows = tuple(_operators(counted, kernels, spec))
        problem = None if rows else "the trace has no operator shapes (record_shapes=True)"
    return Roofline(spec=spec, operators=rows, kernels_ns=total, problem=problem)


def work_of(name: str, klass: KernelClass, dims: Any, types: Any) -> Work | None:
    """FLOPs and bytes of an operator from PyTorch's ``Input Dims`` and ``Input type``.

    Matrix products, and operators whose kernel is of a memory-bound class, whose output is taken to
    be as large as their largest input (a reduction's or a lookup's as nothing). None for others,
    and where the shapes are missing.
    """
    shapes = _shapes(dims, types)
    if name in _PRODUCTS:
        first, second = _PRODUCTS[name]
        if not (shapes.get(first) and shapes.get(second)):
            return None
        return _product(shapes[first], shapes[second])
    if klass not in MEMORY_BOUND or klass in (KernelClass.OPTIMIZER, KernelClass.EMBEDDING):
        return None
    sizes = [prod(shape) * width for shape, width in shapes.values()]
    if not sizes:
        return None
    output = 0 if klass is KernelClass.REDUCTION else max(sizes)
    return Work(flops=0.0, bytes=float(sum(sizes) + output))


def _shapes(dims: Any, types: Any) -> dict[int, tuple[tuple[int, ...], int]]:
    """Shape and bytes per element of each tensor input by its position."""
    if not (isinstance(dims, list | tuple) and isinstance(types, list | tuple)):
        return {}
    found = {}
    for position, (shape, kind) in enumerate(zip(dims, types, strict=False)):
        width = _BYTES.get(kind.lower()) if isinstance(kind, str) else None
        if width is not None and num_elements(shape):
            found[position] = (tuple(shape), width)
    return found


def num_elements(shape: Any) -> int | None:
    """Elements of a tensor of this shape; None if it is no shape of one or more dimensions."""
    if not isinstance(shape, list | tuple) or not shape:
        return None
    if not all(isinstance(side, int) and 0 <= side <= _MAX_ELEMENTS for side in shape):
        return None
    number = prod(shape)
    return number if number <= _MAX_ELEMENTS else None


def _product(a: tuple[tuple[int, ...], int], b: tuple[tuple[int, ...], int]) -> Work | None:
    """``a`` [..., M, K] times ``b`` [..., K, N]; grouped: ``a`` [M, K], ``b`` [E, K, N]."""
    (left, left_width), (right, right_width) = a, b
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return None
    batch = prod(left[:-2])
    m, k, n = left[-2], left[-1], right[-1]
    moved = prod(left) * left_width + prod(right) * right_width + batch * m * n * left_width
    return Work(flops=2.0 * batch * m * n * k, bytes=float(moved))


def _operators(counted: Account, kernels: np.ndarray, spec: DeviceSpec) -> list[OperatorRoof]:
    trace = counted.trace
    owners = operators_of(trace, kernels, counted.launch[kernels])
    rows: dict[int, list[tuple[int, int]]] = {}
    durations = trace.dur_ns[kernels].tolist()
    for kernel, owner, ns in zip(kernels.tolist(), owners.tolist(), durations, strict=True):
        if owner >= 0:
            rows.setdefault(owner, []).append((ns, -kernel))
    found = []
    works: dict[tuple[int, int, KernelClass], Work | None] = {}
    for owner, launched in sorted(rows.items()):
        longest = -max(launched)[1]
        info, args = counted.info(longest), trace.args(owner)
        types = args.get("Input type")
        key = int(trace.name[owner]), int(trace.detail[owner]), info.klass
        if key not in works:
            name = trace.name_of(owner)
            works[key] = work_of(name, info.klass, args.get("Input Dims"), types)
        work = works[key]
        if work is None:
            continue
        memory_ns = work.bytes / spec.bytes_per_s * 1e9
        arithmetic_ns = work.flops / spec.peak_flops(_rate(types, info.tensor_cores)) * 1e9
        found.append(
            OperatorRoof(
                operator=owner,
                kernel=longest,
                klass=info.klass,
                dur_ns=sum(ns for ns, _ in launched),
                work=work,
                is_memory_bound=memory_ns >= arithmetic_ns,
                ideal_ns=max(memory_ns, arithmetic_ns),
            )
        )
    return found


def _rate(types: Any, tensor_cores: bool | None) -> str:
    """Whose peak applies: fp32 products without tensor cores run at the fp32 rate."""
    first = next((t for t in types if isinstance(t, str) and t.lower() in _BYTES), "")
    wide = _BYTES.get(first.lower(), 2) >= 4
    return "fp32" if wide and not tensor_cores else "bf16"
