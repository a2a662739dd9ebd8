"""What a kernel does, from its name alone: its class, library, number type and tensor cores.

The first rule that matches wins, so the order of ``_RULES`` is part of the meaning:
communication before everything, convolutions before the GEMMs that implement them.
"""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache


class KernelClass(enum.StrEnum):
    """Kinds of work on the device."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped gemm"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    NORM = "norm"
    LOSS = "softmax and loss"
    MOE_ROUTING = "moe routing"
    """Scores, top-k, permutation and combination of tokens."""
    EMBEDDING = "embedding and gather"
    OPTIMIZER = "optimizer"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    SORT = "sort and scan"
    COLLECTIVE = "collective"
    """NCCL, RCCL, symmetric memory and other collectives."""
    EXPERT_COMMUNICATION = "expert communication"
    """Token dispatch and combine across ranks outside NCCL: DeepEP, NVSHMEM and the like."""
    COPY = "copy"
    """Memory copies and sets, which are no kernels."""
    OTHER = "other"


COMMUNICATION = frozenset({KernelClass.COLLECTIVE, KernelClass.EXPERT_COMMUNICATION})
MEMORY_BOUND = frozenset(
    {
        KernelClass.NORM,
        KernelClass.LOSS,
        KernelClass.EMBEDDING,
        KernelClass.OPTIMIZER,
        KernelClass.POINTWISE,
        KernelClass.REDUCTION,
    }
)
"""Classes that on any current device are limited by memory traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """What a kernel's name tells."""

    klass: KernelClass
    """The class."""
    collective: str | None = None
    """Of communication: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``,
    ``broadcast``, ``reduce``, ``send/recv``, ``dispatch``, ``combine``, or ``unknown``."""
    library: str | None = None
    """``cuBLAS``, ``CUTLASS``, ``Tensile``, ``Triton``, ``NCCL`` ...; None if unknown."""
    dtype: str | None = None
    """Type of the inputs: ``fp64``, ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``, ``int8``."""
    tensor_cores: bool | None = None
    """Of GEMMs and convolutions: whether matrix units are used, None if the name does not tell."""

    @property
    def is_communication(self) -> bool:
        """Whether its time counts as communication."""
        return self.klass in COMMUNICATION


_Search = Callable[[str], "re.Match[str] | None"]
_ENOUGH = 4096


def _search(pattern: str) -> _Search:
    return re.compile(pattern, re.IGNORECASE).search


_RULES: list[tuple[KernelClass, _Search]] = [
    (klass, _search(pattern))
    for klass, pattern in (
        (
            KernelClass.EXPERT_COMMUNICATION,
            r"deep_?ep|hybrid_?ep|(?<!\w)ep::(?:\w+::)*\w*(?:dispatch|combine|notify)|nvshmem"
            r"|rocshmem|a2a_(?:dispatch|combine)|uccl.*(?:dispatch|combine)|pplx",
        ),
        (
            KernelClass.COLLECTIVE,
            r"nccl|rccl|symm_?mem|multimem_|(?:one|two)_?shot_\w*(?:all_?reduce|reduce_?scatter)"
            r"|cross_device_reduce|mscclpp|msccl|userbuffers|oneccl|all_?reduce|all_?gather"
            r"|reduce_?scatter|all_?to_?all",
        ),
        (KernelClass.SORT, r"topk(?!_?gating)|radixsort|bitonicsort"),
        (KernelClass.EMBEDDING, r"split_embedding|embedding_bag|pooled_embs"),
        (
            KernelClass.CONVOLUTION,
            r"conv(?!er)|fft2d|implicit_?gemm|wgrad|dgrad|fprop|winograd|igemm_(?:fwd|bwd|wrw)|miopen.*gemm"
            r"|im2col|col2im|nchwtonhwc|nhwctonchw",
        ),
        (KernelClass.GROUPED_GEMM, r"grouped_?(?:gemm|mm)|groupproblemshape|gmm_|moe_gemm"),
        (
            KernelClass.OPTIMIZER,
            r"adam(?!ax)|(?<![a-z])lamb(?!da)|multi_?tensor|fused_?sgd|(?<![a-z])muon",
        ),
        (
            KernelClass.ATTENTION,
            r"flash|fmha|attn|attention|sdpa|mha_|fav[23]|(?<![a-z])mla_",
        ),
        (
            KernelClass.MOE_ROUTING,
            r"moe|expert|router|routing|(?<![a-z])route_|topk_?gating|token_(?:dispatch|permut)"
            r"|(?<![a-z])(?:un)?permute_(?:token|row)|(?<![a-z])combine_(?:fwd|bwd)",
        ),
        (
            KernelClass.NORM,
            r"(?:layer|rms|batch|group|instance)_?norm|(?<![a-z])bn_?(?:fw|bw)|gammabeta"
            r"|rowwisemoments|triton_.*(?:rsqrt|native_layer_norm)|(?<![a-z])norm_(?:fwd|bwd)",
        ),
        (KernelClass.LOSS, r"soft_?max|cross_?entropy|nll_?loss|(?:mse|l1|bce)_?loss"),
        (
            KernelClass.EMBEDDING,
            r"embedding|index_?select|index_?put|indexing|index_elementwise|gather|scatter|jagged"
            r"|fbgemm|compute_grad_weight|krn_partials|sum_and_scatter",
        ),
        (
            KernelClass.GEMM,
            r"gemm|gemv|cublas|cijk_|nvjet|cutlass|splitk_?reduce|(?<![a-z])mm_|triton_(?:tem|mm)"
            r"|wgmma|(?<![a-z])dot_kernel|matmul|addmm",
        ),
        (
            KernelClass.SORT,
            r"sort|scan|cumsum|(?<![a-z])unique|histogram|cub::|rocprim|thrust",
        ),
        (KernelClass.REDUCTION, r"reduce|triton_(?:red|per)|argmax|argmin|lpnorm|(?<![a-z])norm"),
        (
            KernelClass.POINTWISE,
            r"elementwise|vectorized|unrolled|functor|triton_poi|pointwise|tensorop|activation"
            r"|gelu|silu|swiglu|relu|dropout|copy|catarray|fill|distribution|rope|rotary|cast"
            r"|pool|triton_|upsample|transpose|arange|where|bias",
        ),
    )
]
_COLLECTIVES = [
    (kind, _search(pattern))
    for kind, pattern in (
        ("all-reduce", r"all_?reduce|cross_device_reduce"),
        ("reduce-scatter", r"reduce_?scatter"),
        ("all-gather", r"all_?gather"),
        ("all-to-all", r"all_?to_?all|a2a"),
        ("send/recv", r"send_?recv|(?<![a-z])send|(?<![a-z])recv"),
        ("broadcast", r"broadcast|bcast"),
        ("reduce", r"nccl\w*_reduce_"),
        ("dispatch", r"dispatch"),
        ("combine", r"combine"),
    )
]
_COMMUNICATION_LIBRARIES = [
    (library, _search(pattern))
    for library, pattern in (
        ("DeepEP", r"deep_?ep|hybrid_?ep|(?<!\w)ep::"),
        ("MSCCL++", r"msccl"),
        ("NVSHMEM", r"nvshmem"),
        ("rocSHMEM", r"rocshmem"),
        ("symmetric memory", r"symm_?mem|multimem_|(?:one|two)_?shot_"),
        ("RCCL", r"rccl|nccldevkernel_generic"),
        ("NCCL", r"nccl"),
    )
]
_LIBRARIES = [
    (library, _search(pattern))
    for library, pattern in (
        ("Tensile", r"cijk_"),
        ("MIOpen", r"miopen|igemm_(?:fwd|bwd|wrw)"),
        ("cuDNN", r"cudnn|implicit_?gemm|xmma_(?:fprop|dgrad|wgrad)"),
        ("FlashAttention", r"flash"),
        ("cuBLAS", r"cublas|nvjet|xmma_gemm|gemmsn|splitkreduce|(?:ampere|volta|turing)_\w*gemm"),
        ("cuBLAS", r"cutlass_(?:70|75|80|90|100)_|cutlass_\w*_(?:wmma|tensorop|simt)"),
        ("CUTLASS", r"cutlass"),
        ("Triton", r"^triton_"),
        ("PyTorch", r"at::|at_cuda|at_hip"),
        ("FBGEMM", r"fbgemm|split_embedding"),
    )
]
_DTYPES = [
    (dtype, _search(pattern))
    for dtype, pattern in (
        ("fp8", r"e4m3|e5m2|fp8|f8f8|float_?8"),
        ("bf16", r"bf16|bfloat16|nv_bfloat"),
        ("tf32", r"tf32|s1688gemm(?!_fp16)|s1684gemm"),
        (
            "fp16",
            r"fp16|(?<![a-z])f16|half|_h(?:884|1688|16816)?gemm|[sh]884gemm|s16816gemm|16816",
        ),
        ("int8", r"int8|(?<![a-z])i8|imma"),
        ("fp64", r"fp64|f64|double|dgemm|_d884"),
        ("fp32", r"f32|fp32|sgemm|float|ffma|s_gemm"),
    )
]
_NVJET = _search(r"nvjet(?:_sm\d+)?_([a-z])[a-z]{2,4}_")
_NVJET_TYPES = {"h": "fp16", "t": "bf16", "s": "tf32", "q": "fp8", "o": "fp8", "d": "fp64"}
_TENSILE = _search(r"Cijk_\w*?_(F8|B8|HH|HS|BB|BS|S|SS|X|XX|D|I8)[A-Z]{0,2}_B?H?")
_TENSILE_TYPES = {
    "F8": "fp8",
    "B8": "fp8",
    "HH": "fp16",
    "HS": "fp16",
    "BB": "bf16",
    "BS": "bf16",
    "S": "fp32",
    "SS": "fp32",
    "X": "tf32",
    "XX": "tf32",
    "D": "fp64",
    "I8": "int8",
}
_MATRIX_UNITS = _search(
    r"tensorop|s1688|s16816|[hsid]884|wgmma|gmma|nvjet|hmma|imma|wmma|_mma|(?<!x)mma_|16816"
    r"|_MI\d+x\d+|mfma|tf32f32|warpgroupsize"
)
_NO_MATRIX_UNITS = _search(
    r"simt|ffma|gemv|gemmsn|sgemm|cijk_(?!.*_MI\d)|dot_kernel|winograd_nonfused|_fma(?![a-z])"
)


def classify(name: str) -> KernelInfo:
    """What the kernel of this name does; class ``other`` if no rule knows it."""
    return _classify(name[:_ENOUGH])


@lru_cache(maxsize=65536)
def _classify(name: str) -> KernelInfo:
    klass = next((klass for klass, found in _RULES if found(name)), KernelClass.OTHER)
    if klass in COMMUNICATION:
        return KernelInfo(
            klass=klass, collective=_first(_COLLECTIVES, name, "unknown"), library=_comm(name)
        )
    matrix = klass in (KernelClass.GEMM, KernelClass.GROUPED_GEMM, KernelClass.CONVOLUTION)
    return KernelInfo(
        klass=klass,
        library=_first(_LIBRARIES, name),
        dtype=_dtype(name) if matrix or klass is KernelClass.ATTENTION else None,
        tensor_cores=_tensor_cores(name) if matrix else None,
    )


def _first(table: list[tuple[str, _Search]], name: str, default: str | None = None) -> str | None:
    return next((label for label, found in table if found(name)), default)


def _comm(name: str) -> str | None:
    return _first(_COMMUNICATION_LIBRARIES, name)


def _dtype(name: str) -> str | None:
    if found := _NVJET(name):
        return _NVJET_TYPES.get(found[1])
    if found := _TENSILE(name):
        return _TENSILE_TYPES.get(found[1])
    return _first(_DTYPES, name)


def _tensor_cores(name: str) -> bool | None:
    if _MATRIX_UNITS(name):
        return True
    return False if _NO_MATRIX_UNITS(name) else None
