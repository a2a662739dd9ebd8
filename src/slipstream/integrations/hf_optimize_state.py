"""A forward bound to one module instance, and what it takes to undo that.

Classes stay as they are; parameters, buffers and names too: a replaced module carries two more
plain attributes, its ``forward`` and a record of what was there before.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn, Self

from torch import nn

from slipstream.errors import ConfigError
from slipstream.nn.site import check_action

KEY = "_slipstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a replaced module carries."""

    kind: str
    """``norm``, ``attention``, ``layer``, ...: the row of the report."""
    forward: Callable[..., Any]
    """Ours; takes the module first."""
    stock: Callable[..., Any]
    """The one before; takes the module first."""
    own: bool
    """Whether the one before was bound to this instance and not its class's."""
    settings: Any
    """What was read from the module when it was replaced."""

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        # A bound forward is pickled by name, which its class does not have: it would not load.
        raise ConfigError(
            "optimize: an optimized model is not pickled; save its state_dict() or use "
            "save_pretrained, or call slipstream.restore(model) first"
        )


def state_of(module: nn.Module) -> State | None:
    """The record of a replaced module; None for any other."""
    return module.__dict__.get(KEY)


def action_of(module: nn.Module) -> str:
    """What backward keeps of a replaced module; ConfigError for an action it does not know."""
    action, actions = module.__dict__.get("recompute", "keep"), ("keep",)
    if action != "keep":
        actions = module.__dict__.get("recompute_actions", actions)
        check_action(type(module).__name__, action, actions)
    return action


def own_forward(module: nn.Module) -> bool:
    """Whether somebody bound a forward to this instance."""
    return "forward" in module.__dict__


def ours(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a replaced module; its class's once restored, for wrappers that outlive it."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if KEY not in self.__dict__:
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    call.__name__, call.__doc__ = forward.__name__, forward.__doc__
    # No __wrapped__: who unwraps forwards would end up inside.
    call.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return call


def bind(module: nn.Module, kind: str, forward: Callable[..., Any], settings: Any) -> None:
    """Give this instance a forward, which takes the module first."""
    own = own_forward(module)
    stock = module.__dict__["forward"].__func__ if own else type(module).forward
    state = State(kind=kind, forward=forward, stock=stock, own=own, settings=settings)
    module.__dict__[KEY] = state
    module.__dict__["forward"] = MethodType(forward, module)


def unbind(module: nn.Module) -> None:
    """Put back what ``bind`` replaced; a wrapper put around ours since then stays."""
    state = module.__dict__.pop(KEY)
    if not runs(module, state):
        return
    if state.own:
        module.__dict__["forward"] = MethodType(state.stock, module)
    else:
        del module.__dict__["forward"]


def runs(module: nn.Module, state: State) -> bool:
    """Whether the module's forward is still ours, and no wrapper around it."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is state.forward


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks, which a direct use of its weights would skip."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def settings_if_plain(module: nn.Module, kind: str) -> Any:
    """The settings of a module that runs our forward and nothing else; None for any other."""
    state = module.__dict__.get(KEY)
    if state is None or state.kind != kind or hooked(module):
        return None
    return state.settings if runs(module, state) else None
