"""Kernel names of libraries and devices in use, and what they are."""

import pytest

from slipstream.diagnose.classify import COMMUNICATION, KernelClass, classify

WORK = [
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "gemm", "cuBLAS", "bf16", True),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"
     "_segment_k_off_kernel__5x_cublas", "gemm", "cuBLAS", "bf16", True),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "gemm", "cuBLAS", "bf16", True),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm", "cuBLAS", "fp16", True),
    ("nvjet_sm100_qqtst_128x64_64x4", "gemm", "cuBLAS", "fp8", True),
    ("volta_h884gemm_64x64_ldg8_nn", "gemm", "cuBLAS", "fp16", True),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "gemm", "cuBLAS", "fp16", True),
    ("volta_sgemm_128x32_nt", "gemm", "cuBLAS", "fp32", False),
    ("ampere_sgemm_128x64_nn", "gemm", "cuBLAS", "fp32", False),
    ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false>", "gemm", "cuBLAS", "fp32", False),
    ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>", "gemm", "cuBLAS",
     "tf32", True),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, "
     "cutlass::bfloat16_t, wgmma>>", "gemm", "CUTLASS", "bf16", True),
    ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1", "gemm", "Tensile",
     "bf16", True),
    ("Cijk_Alik_Bljk_HHS_BH_MT128x64x32_MI32x32x1", "gemm", "Tensile", "fp16", True),
    ("Cijk_Ailk_Bljk_SB_MT64x64x8_SN", "gemm", "Tensile", "fp32", False),
    ("triton_tem_fused_mm_4", "gemm", "Triton", None, None),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<"
     "cutlass::gemm::GroupProblemShape<cute::tuple<int>>, cutlass::bfloat16_t>>", "grouped gemm",
     "CUTLASS", "bf16", None),
    ("grouped_gemm_kernel", "grouped gemm", None, None, None),
    ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw", "convolution",
     "cuDNN", "tf32", True),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, "
     "cutlass::bfloat16_t>>", "attention", "FlashAttention", "bf16", None),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention", "CUTLASS", "bf16", None),
    ("attn_fwd", "attention", None, None, None),
]  # fmt: skip

CLASSES = {
    KernelClass.NORM: (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>",
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
        "_rms_norm_backward_kernel",
    ),
    KernelClass.LOSS: (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>",
        "nll_loss_forward_reduce_cuda_kernel_2d",
        "linear_cross_entropy_kernel",
    ),
    KernelClass.MOE_ROUTING: ("moe_align_block_size_kernel", "route_fwd_kernel", "combine_fwd"),
    KernelClass.EMBEDDING: (
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>",
    ),
    KernelClass.OPTIMIZER: (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>",
        "_fused_adamw_kernel",
    ),
    KernelClass.POINTWISE: (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<{lambda()#2}>>",
        "triton_poi_fused_add_0",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>",
        "SubTensorOpWithScalar1d",
    ),
    KernelClass.REDUCTION: (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>",
    ),
    KernelClass.SORT: (
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>>",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>",
    ),
    KernelClass.OTHER: ("", "void bounds_check_indices_kernel<long>(long)", "kernel \u00e9"),
}

TRANSFERS = [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "collective", "all-reduce", "NCCL"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective",
     "all-gather", "NCCL"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "collective", "reduce-scatter", "NCCL"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "collective", "reduce", "NCCL"),
    ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "collective", "broadcast", "NCCL"),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "collective", "send/recv", "NCCL"),
    ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "collective", "unknown", "RCCL"),
    ("void mscclpp::allreduce<float>", "collective", "all-reduce", "MSCCL++"),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 4>", "collective", "all-reduce", None),
    ("multimem_all_reduce_kernel", "collective", "all-reduce", "symmetric memory"),
    ("two_shot_all_reduce_kernel", "collective", "all-reduce", "symmetric memory"),
    ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "expert communication", "dispatch",
     "DeepEP"),
    ("void deep_ep::internode_ll::combine<true, 7168>(void*)", "expert communication", "combine",
     "DeepEP"),
    ("nvshmemi_proxy_quiet_kernel", "expert communication", "unknown", "NVSHMEM"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "klass", "library", "dtype", "tensor_cores"), WORK, ids=lambda v: str(v)[:40]
)
def test_matrix_kernels(
    name: str, klass: str, library: str | None, dtype: str | None, tensor_cores: bool | None
) -> None:
    info = classify(name)
    assert (info.klass, info.library, info.dtype) == (klass, library, dtype)
    assert info.tensor_cores is tensor_cores
    assert not info.is_communication


@pytest.mark.parametrize(
    ("name", "klass"),
    [(name, klass) for klass, names in CLASSES.items() for name in names],
    ids=lambda v: str(v)[:50],
)
def test_class(name: str, klass: KernelClass) -> None:
    info = classify(name)
    assert info.klass is klass
    assert info.tensor_cores is None


@pytest.mark.parametrize(
    ("name", "klass", "collective", "library"), TRANSFERS, ids=lambda v: str(v)[:40]
)
def test_communication(name: str, klass: str, collective: str, library: str | None) -> None:
    info = classify(name)
    assert (info.klass, info.collective, info.library) == (klass, collective, library)
    assert info.klass in COMMUNICATION
    assert info.is_communication


def test_a_name_of_a_megabyte_is_classified_by_its_beginning() -> None:
    assert classify("ncclKernel_AllReduce" + "x" * 2**20).collective == "all-reduce"
