"""Sites: modules that can give up what backward would keep and make it again."""

from collections.abc import Sequence

from torch import nn

from slipstream.errors import ConfigError


def check_action(name: str, action: object, allowed: Sequence[str]) -> None:
    """ConfigError where a site of this class name is given an action it does not know."""
    if action not in allowed:
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
