"""FLOPs and bytes from shapes, and kernels against their limit."""

from pathlib import Path

import pytest

from slipstream.diagnose import read
from slipstream.diagnose.account import account_trace
from slipstream.diagnose.classify import KernelClass
from slipstream.diagnose.roofline import Roofline, Work, roofline, work_of
from tests.diagnose.machine import GEMM, POINTWISE, Machine
from tests.diagnose.real import counted

BF16 = "c10::BFloat16"
PRODUCT = KernelClass.GEMM


@pytest.mark.parametrize(
    ("name", "klass", "dims", "types", "work"),
    [
        ("aten::mm", PRODUCT, [[4, 8], [8, 16]], [BF16] * 2, Work(flops=1024, bytes=448)),
        (
            "aten::addmm",
            PRODUCT,
            [[16], [4, 8], [8, 16], [], []],
            ["float", "float", "float", "Scalar", "Scalar"],
            Work(flops=1024, bytes=896),
        ),
        ("aten::bmm", PRODUCT, [[3, 4, 8], [3, 8, 16]], [BF16] * 2, Work(flops=3072, bytes=1344)),
        (
            "aten::_grouped_mm",
            KernelClass.GROUPED_GEMM,
            [[64, 8], [4, 8, 16]],
            [BF16] * 2,
            Work(flops=2 * 64 * 8 * 16, bytes=2 * (64 * 8 + 4 * 8 * 16 + 64 * 16)),
        ),
        (
            "aten::add",
            KernelClass.POINTWISE,
            [[10, 6], [6], []],
            ["float", "float", "Scalar"],
            Work(flops=0, bytes=4 * (60 + 6 + 60)),
        ),
        (
            "aten::native_layer_norm",
            KernelClass.NORM,
            [[10, 6], [], [6], [6], []],
            [BF16, "ScalarList", BF16, BF16, "Scalar"],
            Work(flops=0, bytes=2 * (60 + 6 + 6 + 60)),
        ),
        ("aten::sum", KernelClass.REDUCTION, [[10, 6]], ["double"], Work(flops=0, bytes=480)),
    ],
)
def test_work(name: str, klass: KernelClass, dims: list, types: list, work: Work) -> None:
    assert work_of(name, klass, dims, types) == work


@pytest.mark.parametrize(
    ("name", "klass", "dims", "types"),
    [
        ("aten::mm", PRODUCT, None, None),
        ("aten::mm", PRODUCT, [[4, 8]], [BF16]),
        ("aten::mm", PRODUCT, [[4, 8], [9, 16]], [BF16] * 2),
        ("aten::mm", PRODUCT, [[4, 8], "x"], [BF16, BF16]),
        ("aten::mm", PRODUCT, [[4, -8], [-8, 2]], [BF16, BF16]),
        ("aten::convolution", KernelClass.CONVOLUTION, [[1, 3, 8, 8], [4, 3, 3, 3]], [BF16] * 2),
        ("aten::add", KernelClass.POINTWISE, [[4], [4]], ["Scalar", "of another kind"]),
        ("aten::add", KernelClass.POINTWISE, 7, 7),
        ("aten::embedding", KernelClass.EMBEDDING, [[100, 8], [4]], ["float", "long int"]),
    ],
)
def test_unknown_work(name: str, klass: KernelClass, dims: object, types: object) -> None:
    assert work_of(name, klass, dims, types) is None


def roofs(machine: Machine, folder: Path) -> Roofline:
    return roofline(account_trace(read([machine.save(folder)]).traces[0]))


def test_bound_and_attained(tmp_path: Path) -> None:
    machine = Machine()
    side, elements = 8192, 2**28
    machine.launch(GEMM, 2_000, op="aten::mm", dims=[[side, side], [side, side]], dtype=BF16)
    machine.launch(POINTWISE, 500, op="aten::relu", dims=[[elements]], dtype=BF16)
    found = roofs(machine, tmp_path)
    product, pointwise = found.operators
    assert (product.is_memory_bound, pointwise.is_memory_bound) == (False, True)
    assert product.attained_pct == pytest.approx(100 * 2 * side**3 / 989e12 / 2e-3)
    assert pointwise.attained_pct == pytest.approx(100 * 4 * elements / 4.8e12 / 500e-6)
    assert found.covered_pct == 100


def test_thin_product_is_memory_bound(tmp_path: Path) -> None:
    machine = Machine()
    machine.launch(GEMM, 100, op="aten::mm", dims=[[8, 8192], [8192, 8192]], dtype=BF16)
    assert roofs(machine, tmp_path).operators[0].is_memory_bound


def test_fp32_without_tensor_cores_has_its_own_peak(tmp_path: Path) -> None:
    machine = Machine()
    machine.launch("ampere_sgemm_128x128_tn", 20_000, op="aten::mm", dims=[[8192, 8192]] * 2)
    (product,) = roofs(machine, tmp_path).operators
    assert product.ideal_ns == pytest.approx(2 * 8192**3 / 67e12 * 1e9)


def test_unknown_device(tmp_path: Path) -> None:
    machine = Machine(device="Tesla K80")
    machine.launch(GEMM, 100, op="aten::mm", dims=[[64, 64], [64, 64]], dtype=BF16)
    found = roofs(machine, tmp_path)
    assert found.operators == ()
    assert found.problem == "the peaks of Tesla K80 are unknown"


def test_no_shapes(tmp_path: Path) -> None:
    machine = Machine()
    machine.launch(GEMM, 100, op="aten::mm")
    assert "record_shapes" in (roofs(machine, tmp_path).problem or "")


def test_real_trace_stays_below_the_peaks() -> None:
    found = roofline(counted("bert_small_h100").ranks[0])
    assert found.spec is not None
    assert found.spec.name == "NVIDIA H100 80GB HBM3"
    assert found.covered_pct > 70
    assert all(one.attained_pct < 100 for one in found.operators)
