"""How numbers and names are written in every form of the report."""

from collections.abc import Sequence
from statistics import median

from slipstream.diagnose.findings import Finding


def milliseconds(value: float | None) -> str:
    """Milliseconds with about three digits: ``0.016 ms``, ``12.5 ms``, ``1,222 ms``, ``12.8 s``."""
    if value is None:
        return "-"
    if value >= 100_000:
        return f"{value / 1000:,.0f} s"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 100:
        return f"{value:,.0f} ms"
    if value >= 10:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms" if value >= 0.1 or not value else f"{value:.3f} ms"


def microseconds(value: float) -> str:
    """Microseconds below 1 ms, milliseconds above."""
    return milliseconds(value / 1000) if value >= 1000 else f"{value:.1f} us"


def percent(value: float | None) -> str:
    """Percent with one digit, ``-`` for None."""
    return "-" if value is None else f"{value:.1f} %"


def count(value: float) -> str:
    """A number of things; a mean that is not whole gets one digit."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def data_rate(value: float) -> str:
    """Bytes per second in GB/s."""
    return f"{value / 1e9:,.2f} GB/s"


def data_size(value: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def evidence(name: str, value: float | int | str | Sequence[str] | None) -> str:
    """A number of a finding as ``name: value``, its unit taken from the end of its name."""
    for ending, written in _UNITS.items():
        if name.endswith(ending) and isinstance(value, int | float):
            return f"{name.removesuffix(ending).replace('_', ' ')}: {written(value)}"
    if value is None:
        text = "not known"
    elif isinstance(value, str):
        text = value
    elif isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    else:
        text = ", ".join(value)
    return f"{name.replace('_', ' ')}: {text}"


_UNITS = {
    "_bytes_per_s": data_rate,
    "_bytes": data_size,
    "_pct": percent,
    "_ms": milliseconds,
    "_us": microseconds,
}


def cost(finding: Finding) -> str:
    """What a finding puts at stake: ``5.58 ms a step (41.0 %)``; empty if nothing."""
    if not finding.ms:
        return ""
    over = " a step" if finding.per == "step" else " of the whole file"
    return f"{milliseconds(finding.ms)}{over} ({percent(finding.pct)})"


def step_times(host_ms: Sequence[float]) -> str:
    """Median and range of the steps' times on the host: ``6 of 76.8 ms (75.5 to 81.1 ms)``."""
    whole = f"{len(host_ms)} of {milliseconds(median(host_ms))} on the host"
    if len(host_ms) == 1:
        return whole
    return f"{whole} ({milliseconds(min(host_ms))} to {milliseconds(max(host_ms))})"


def rank_list(ranks: Sequence[int], of: int) -> str:
    """``rank 3``, ``ranks 0, 2``, ``all ranks`` of a job of that many; empty for none."""
    if not ranks:
        return ""
    if len(ranks) == of:
        return "all ranks"
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + listed


def sentence(text: str) -> str:
    """A title with a capital, fit to print."""
    return printable(text[:1].upper() + text[1:])


def printable(text: str) -> str:
    """A name from a trace without what could steer a terminal or is no character at all."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text
    )


def short_name(name: str, limit: int = 160) -> str:
    """A kernel name without what repeats: return type, argument list, anonymous namespaces."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth, cut = 0, len(text)
    for position, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and position and text[position - 1] != " ":
            cut = position
            break
    text = printable(text[:cut].replace("at::native::", "").strip() or name)
    return text if len(text) <= limit else text[: limit - 3] + "..."
