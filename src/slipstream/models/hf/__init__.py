"""Conversion from and to Hugging Face folders; needs safetensors, not transformers.

A family is one module: its config keys and tensor names as data. Adding one is that module and its
name in ``registry.py``.
"""

from slipstream.models.hf.exporter import MAX_SHARD_BYTES, export_folder
from slipstream.models.hf.importer import import_folder
from slipstream.models.hf.registry import FAMILIES, family_of

__all__ = ["FAMILIES", "MAX_SHARD_BYTES", "export_folder", "family_of", "import_folder"]
