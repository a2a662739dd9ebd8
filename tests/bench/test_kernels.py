"""Which kernels count as matrix products."""

import re
from pathlib import Path

import pytest
import torch

from slipstream.bench.kernels import is_gemm, kernel_ms, share_not_gemm
from slipstream.ops import moe

KERNELS = Path(moe.__file__).parent
GEMMS = [
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel"
    "::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int>>>>>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
    "moe_up_kernel",
    "moe_rows_kernel",
    "moe_da_kernel",
    "moe_outer_kernel",
    "moe_router_bwd_dw_kernel",
    "_scatter2scatter",
    "_groupXtY",
    "_fused_up_proj_swiglu_kernel",
    "_moe_bwd_dX_expanded_kernel",
    "triton_tem_fused_mm_0",
]
OTHERS = [
    "void at::native::elementwise_kernel<128, 4, float>",
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>",
    "moe_activation_bwd_kernel",
    "moe_gather_sum_kernel",
    "moe_router_split_kernel",
    "moe_choose_kernel",
    "moe_gather_rows_kernel",
    "_token_gather_weighted_sum_kernel",
    "triton_poi_fused_mul_silu_1",
    "Memset (Device)",
]


@pytest.mark.parametrize("name", GEMMS)
def test_matrix_products(name: str) -> None:
    assert is_gemm(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name: str) -> None:
    assert not is_gemm(name)


def test_the_rule_names_kernels_that_exist() -> None:
    source = "".join(path.read_text() for path in KERNELS.rglob("*kernels.py"))
    defined = re.findall(r"^def (moe_\w+_kernel)\(", source, re.MULTILINE)
    assert {name for name in defined if is_gemm(name)} == {
        "moe_up_kernel",
        "moe_rows_kernel",
        "moe_da_kernel",
        "moe_outer_kernel",
        "moe_router_fwd_kernel",
        "moe_router_bwd_dx_kernel",
        "moe_router_bwd_dw_kernel",
    }


def test_share() -> None:
    assert share_not_gemm({"moe_up_kernel": 6.0, "Memset (Device)": 1.0, "sort": 1.0}) == 0.25
    assert share_not_gemm({}) == 0.0


@pytest.mark.gpu
def test_the_kernels_of_a_call() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = kernel_ms(lambda: (x @ x).add_(1), torch.device("cuda"))
    assert len(found) == 2
    assert 0 < share_not_gemm(found) < 0.5
