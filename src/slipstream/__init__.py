"""Slipstream: train dense and Mixture-of-Experts language models faster (PyTorch + Triton).

The public names load on first use; importing the package touches no GPU.
"""

from importlib import import_module, metadata
from typing import Any

__version__ = metadata.version("slipstream-train")

_PUBLIC = {
    "ModelConfig": "slipstream.models.config",
    "RunConfig": "slipstream.train.config",
    "Transformer": "slipstream.models.transformer",
    "load_model": "slipstream.train.restore",
    "ops": "slipstream.ops",
    "optimize": "slipstream.integrations.hf_optimize",
    "restore": "slipstream.integrations.hf_optimize",
}

__all__ = [
    "ModelConfig",
    "RunConfig",
    "Transformer",
    "__version__",
    "load_model",
    "ops",
    "optimize",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    return module if _PUBLIC[name].rpartition(".")[2] == name else getattr(module, name)
