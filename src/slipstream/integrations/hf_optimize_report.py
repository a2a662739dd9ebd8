"""What ``slipstream.optimize`` did to a model, as a table."""

from dataclasses import dataclass

from slipstream.recompute import Plan, lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Modules of one class that run other code now."""

    kind: str
    """As in the ``skip`` of ``optimize``."""
    module: str
    """Name of their class."""
    count: int
    """How many."""
    by: str
    """What they run now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Modules of one class that stay as they are."""

    module: str
    """Name of their class."""
    count: int
    """How many."""
    first: str
    """Name of the first one in the model."""
    reason: str
    """Why; ``skipped`` if the call named it in ``skip``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of ``slipstream.optimize``; ``print`` it for a table."""

    model: str
    """Name of the model's class."""
    replaced: tuple[Replaced, ...]
    """What runs other code now."""
    kept: tuple[Kept, ...]
    """What was looked at and stays, with the reason."""
    already: bool = False
    """Whether an earlier call had optimized the model, so that this one replaced nothing."""
    plan: Plan | None = None
    """The recomputation plan, if a budget was given."""

    def count(self, kind: str) -> int:
        """How many modules of a kind were replaced."""
        return sum(row.count for row in self.replaced if row.kind == kind)

    def __str__(self) -> str:
        """The table."""
        title = f"slipstream.optimize: {self.model}"
        text = [f"{title} (already optimized)" if self.already else title]
        rows = [(f"{row.count} x {row.module}", row.by) for row in self.replaced]
        rows += [
            (f"{row.count} x {row.module}", f"kept ({row.first}): {row.reason}")
            for row in self.kept
        ]
        width = max((len(left) for left, _ in rows), default=0)
        text += [f"  {left:<{width}}  {right}" for left, right in rows]
        if not self.replaced:
            text.append("  nothing was replaced")
        if self.plan is not None:
            text += [f"  {line}" for line in lines(self.plan)]
        return "\n".join(text)
