"""Packages of the ``data`` extra, imported at first use."""

from importlib import import_module
from typing import Any

from slipstream.errors import DependencyError


def require(package: str, purpose: str) -> Any:
    """The module ``package``; DependencyError tells how to install it for ``purpose``."""
    try:
        return import_module(package)
    except ImportError as error:
        raise DependencyError(
            f"{purpose} needs the package {package} ({error}): pip install 'slipstream-train[data]'"
        ) from None
