"""What options of ``slipstream bench`` and ``tune`` may say, for their help alone.

The lists are those of ``slipstream.bench``, which loads torch; a test holds them to each other.
"""

DTYPES = ("bf16", "fp16", "fp32")
DEVICES = ("auto", "cuda", "cpu")
MOE_SHAPES = ("olmoe", "qwen3-30b", "wide", "mixtral")
"""Each also as NAME-short."""
MOE_PEERS = (
    "slipstream", "slipstream-compiled", "slipstream-save-x", "dense-compiled",
    "grouped_mm-compiled", "grouped_mm-eager", "transformers-grouped_mm", "transformers-eager",
    "scattermoe", "sonicmoe", "liger",
)  # fmt: skip
OPS = (
    "norm", "add-norm", "gelu-norm", "layernorm", "swiglu", "swiglu-fused", "geglu", "gelu", "rope",
    "rope-qk-norm", "adamw-master", "adamw-fp32", "adamw-bf16", "linear-cross-entropy",
    "norm-linear", "activation-linear",
)  # fmt: skip
OPS_PEERS = (
    "slipstream", "slipstream-keep", "eager", "compiled", "torch", "liger", "liger-fp32",
)  # fmt: skip
STEP_ARMS = (
    "stock", "stock-cudnn", "stock-liger", "stock-cudnn-liger", "slipstream-cache",
    "slipstream-cache-compiled", "slipstream", "slipstream-compiled", "slipstream-graph",
    "slipstream-auto",
)  # fmt: skip
STEP_SIZES = ("small", "tiny")
TUNED_VARIABLE = "SLIPSTREAM_TUNED"
