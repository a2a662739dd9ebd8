"""A host and a device in virtual time: what a program does on them, as a trace.

The host runs ahead of the device until it waits for it, as in PyTorch, so the causes of idle time
are known because they are what the program says.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.diagnose.synthetic import dumps, host, write

US = 1000
LAUNCH_US = 5
LATENCY_US = 4
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, add>"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


class Machine:
    """One rank. All times given are microseconds."""

    def __init__(self, rank: int = 0, world: int = 1, device: str = "NVIDIA H200") -> None:
        self.rank, self.world, self.device = rank, world, device
        self.now = 0
        self.free: dict[int, int] = {}
        self.events: list[dict[str, Any]] = []
        self._number = 0

    def work(self, us: float, name: str | None = None) -> None:
        """The host is busy, in an operator if it has a name."""
        if name is not None:
            self._add("cpu_op", name, self.now, us)
        self.now += round(us * US)

    def launch(
        self,
        name: str,
        us: float,
        *,
        stream: int = 7,
        op: str = "aten::mul",
        dims: list[list[int]] | None = None,
        dtype: str = "float",
        grid: int = 64,
        host_us: float = LAUNCH_US,
    ) -> None:
        """A kernel, launched by an operator."""
        number = self._next()
        begin, cost = self.now, round(host_us * US)
        args: dict[str, Any] = {"External id": number}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": [dtype] * len(dims)}
        self.events.append(host("cpu_op", op, begin, cost, **args))
        call = {"correlation": number}
        self.events.append(
            host("cuda_runtime", "cudaLaunchKernel", begin + 500, cost - 500, **call)
        )
        self.now += cost
        start = max(self.free.get(stream, 0), begin + 500 + LATENCY_US * US)
        self._device("kernel", name, start, round(us * US), stream, number, {"grid": [grid, 1, 1]})

    def copy(self, name: str, us: float, size: int = 1 << 20) -> None:
        """An asynchronous copy on the stream of the kernels."""
        number = self._next()
        begin = self.now
        call = {"correlation": number}
        self.events.append(host("cuda_runtime", "cudaMemcpyAsync", begin, LAUNCH_US * US, **call))
        self.now += LAUNCH_US * US
        start = max(self.free.get(7, 0), begin + LATENCY_US * US)
        self._device("gpu_memcpy", name, start, round(us * US), 7, number, {"bytes": size})

    def synchronise(self, call: str = "cudaDeviceSynchronize", op: str | None = None) -> None:
        """The host waits until the device is done, and 3 us more."""
        begin = self.now
        end = max([begin, *self.free.values()]) + 3 * US
        if op is not None:
            self.events.append(host("cpu_op", op, begin, end - begin + US))
        self._add_ns("cuda_runtime", call, begin, end - begin)
        self.now = end + US

    def call(self, name: str, us: float) -> None:
        """A runtime call that takes its time on the host."""
        self._add("cuda_runtime", name, self.now, us)
        self.now += round(us * US)

    def frame(self, name: str, us: float) -> None:
        """A Python function without anything inside."""
        self._add("python_function", name, self.now, us)
        self.now += round(us * US)

    @contextmanager
    def range(self, name: str) -> Generator[None]:
        """A range of the program's own."""
        begin = self.now
        yield
        self._add_ns("user_annotation", name, begin, self.now - begin)

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """A marked step."""
        with self.range(f"ProfilerStep#{number}"):
            yield

    def trace(self) -> bytes:
        """The trace of this rank."""
        return dumps(
            self.events,
            deviceProperties=[{"id": 0, "name": self.device, "computeMajor": 9}],
            distributedInfo={"backend": "nccl", "rank": self.rank, "world_size": self.world},
        )

    def save(self, folder: Path) -> Path:
        """Write it as ``rankN.json``."""
        return write(folder / f"rank{self.rank}.json", self.trace())

    def collective(self, start: int, end: int, number: int) -> None:
        """A collective that was launched under ``number`` and ran from ``start`` to ``end``, ns."""
        self._device("kernel", NCCL, start, end - start, 20, number, {})

    def launch_collective(self) -> tuple[int, int]:
        """Issue a collective after all work so far; its number and when this rank arrives, ns."""
        number = self._next()
        begin, cost = self.now, LAUNCH_US * US
        self.events.append(
            host("cuda_runtime", "cudaLaunchKernel", begin, cost, correlation=number)
        )
        self.now += cost
        ready = max([begin + LATENCY_US * US, *self.free.values()])
        return number, ready

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _device(
        self,
        category: str,
        name: str,
        start: int,
        length: int,
        stream: int,
        number: int,
        args: dict[str, Any],
    ) -> None:
        place = {"device": 0, "stream": stream, "correlation": number, "External id": number}
        self.events.append(host(category, name, start, length, pid=0, tid=stream, **place, **args))
        self.free[stream] = start + length

    def _add(self, category: str, name: str, begin: int, us: float) -> None:
        self._add_ns(category, name, begin, round(us * US))

    def _add_ns(self, category: str, name: str, begin: int, length: int) -> None:
        number = {"External id": self._next()} if category == "cpu_op" else {}
        self.events.append(host(category, name, begin, length, **number))


def all_reduce(machines: list[Machine], transfer_us: float) -> None:
    """One collective over all ranks: it ends on all of them once the last has come."""
    arrivals = [machine.launch_collective() for machine in machines]
    end = max(ready for _, ready in arrivals) + round(transfer_us * US)
    for machine, (number, ready) in zip(machines, arrivals, strict=True):
        machine.collective(ready, end, number)
        machine.free = {stream: max(at, end) for stream, at in machine.free.items()}
