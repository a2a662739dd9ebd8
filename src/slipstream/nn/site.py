"""Sites: modules that can give up what backward would keep and make it again."""

import re
from collections.abc import Sequence

from torch import nn

from slipstream.errors import ConfigError

OFFLOAD = "offload"
"""The action that moves what all parts of a module keep to the host."""
_TIMED = re.compile(rf"{OFFLOAD}(?::([1-9]\d*(?:,[1-9]\d*)*):(\d+))?")


def offload_times(action: str) -> tuple[tuple[int, ...], int] | None:
    """Layers until what is offloaded has left, and by which its return is ahead; None: it stays.

    ``offload:3:2`` is ((3,), 2), plain ``offload`` ((1,), 1). ``offload:1,3,4:2`` is
    ((1, 3, 4), 2): the largest tensor has left after four layers, the next after three, all smaller
    ones after one.
    """
    if not action.startswith(OFFLOAD):
        return None
    found = _TIMED.fullmatch(action)
    if found is None:
        return None
    return tuple(int(leave) for leave in (found[1] or "1").split(",")), int(found[2] or 1)


def timed_offload(leave: Sequence[int], back: int) -> str:
    """The action that ``offload_times`` reads: an age for each tensor, from small to large."""
    ages = list(leave)
    while len(ages) > 1 and ages[0] == ages[1]:
        del ages[0]
    return f"{OFFLOAD}:{','.join(map(str, ages))}:{back}"


def knows(action: object, allowed: Sequence[str]) -> bool:
    """Whether a site that offers ``allowed`` can do ``action``; an offload may be timed."""
    if action in allowed:
        return True
    return OFFLOAD in allowed and isinstance(action, str) and offload_times(action) is not None


def check_action(name: str, action: object, allowed: Sequence[str]) -> None:
    """ConfigError where a site of this class name is given an action it does not know."""
    if not knows(action, allowed):
        raise ConfigError(f"{name}.recompute = {action!r}, expected one of {', '.join(allowed)}")


class Site(nn.Module):
    """A module with a choice of what backward keeps."""

    recompute_actions: tuple[str, ...] = ("keep",)
    """What ``recompute`` can be; the first keeps everything."""

    def __init__(self) -> None:
        super().__init__()
        self._recompute = self.recompute_actions[0]

    @property
    def recompute(self) -> str:
        """What backward keeps from the next forward on. Setting raises ConfigError."""
        return self._recompute

    @recompute.setter
    def recompute(self, action: str) -> None:
        check_action(type(self).__name__, action, self.recompute_actions)
        self._recompute = action
