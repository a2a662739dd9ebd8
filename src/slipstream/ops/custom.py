"""Custom ops that cost nothing in eager mode."""

from collections.abc import Callable
from typing import Any

import torch


class Op:
    """A function that ``torch.compile`` takes as one step and eager code calls as it is.

    The dispatcher costs tens of microseconds a call, several kernel launches' worth.
    """

    def __init__(self, function: Callable[..., Any], registered: Any) -> None:
        self.function, self.registered = function, registered
        self.register_fake = registered.register_fake

    def __call__(self, *args: Any) -> Any:
        """Run it, as an op of its own under the compiler."""
        if torch.compiler.is_compiling():
            return self.registered(*args)
        return self.function(*args)


def custom_op(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Register a function that changes none of its arguments as ``slipstream::name``.

    Called where autograd does not record: in an ``autograd.Function``. Give it a shape function
    with ``register_fake``.
    """

    def register(function: Callable[..., Any]) -> Op:
        registered = torch.library.custom_op(f"slipstream::{name}", mutates_args=())(function)
        return Op(function, registered)

    return register


def or_empty(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """``x``; where there is none, an empty tensor: a custom op returns nothing but tensors."""
    return like.new_empty(0) if x is None else x
