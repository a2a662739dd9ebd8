"""The families by ``model_type``, and the one a config belongs to."""

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.hf.family import Family
from slipstream.models.hf.llama import LLAMA
from slipstream.models.hf.mixtral import MIXTRAL
from slipstream.models.hf.olmoe import OLMOE
from slipstream.models.hf.qwen3 import QWEN3
from slipstream.models.hf.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLAMA, QWEN3, MIXTRAL, QWEN3_MOE, OLMOE)
}


def family_of(config: ModelConfig) -> str:
    """``model_type`` of the family that expresses ``config``; ConfigError names what none can."""
    has_experts = config.moe is not None
    for family in FAMILIES.values():
        if family.qk_norm == config.qk_norm and (family.moe is not None) == has_experts:
            family.check(config)
            return family.name
    kind = "with experts" if has_experts else "without experts"
    raise ConfigError(
        f"model.qk_norm = {config.qk_norm!r} {kind} cannot be written as any of "
        f"{', '.join(FAMILIES)}"
    )
