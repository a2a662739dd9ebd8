"""A plan as lines of text."""

from collections.abc import Sequence

from slipstream.recompute.plan import Plan, Row

HEADER = ("layers", "site", "action", "GiB saved", "ms paid")


def lines(plan: Plan) -> list[str]:
    """One line for each kind of action, layers that do the same together; then the peak."""
    table = [HEADER, *(_cells(rows) for rows in _grouped(plan.rows))]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    found = []
    if plan.rows:
        for row in table:
            left = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
            right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
            found.append("  ".join(left + right))
    if plan.predicted_gib is not None:
        found.append(
            f"predicted peak {plan.predicted_gib:.2f} GiB of {plan.budget_gib:g}, for "
            f"{plan.ms_paid:.2f} ms a pass; with everything kept {plan.unconstrained_gib:.2f} GiB, "
            f"at the least {plan.minimum_gib:.2f} GiB"
        )
    return found


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str, float, float], list[Row]] = {}
    for row in rows:
        key = (row.site, row.action, row.gib_saved, row.ms_paid)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    first, last = rows[0], rows[-1]
    place = first.layer if len(rows) == 1 else f"{len(rows)}: {first.layer} to {last.layer}"
    saved, paid = (sum(getattr(row, key) for row in rows) for key in ("gib_saved", "ms_paid"))
    return place, first.site or "layer", first.action, f"{saved:.3f}", f"{paid:.3f}"
