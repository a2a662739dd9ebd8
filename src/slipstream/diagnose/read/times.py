"""Times of Chrome traces (microseconds, any notation) as whole nanoseconds, without rounding.

A float64 holds microseconds up to 2**43 to better than half a nanosecond, so rounding recovers the
text exactly; beyond (Unix times) the caller has to hand over the text.
"""

from decimal import Decimal, InvalidOperation

import numpy as np

EXACT_US = 2.0**43
MAX_NS = 4 * 10**18
"""Times and durations beyond are errors; Unix time reaches this in the year 2096."""


class InexactTimesError(Exception):
    """Some time is a float too large to tell the nanosecond."""


def whole_ns(values: list[object], *, texts: bool = False) -> np.ndarray:
    """int64 nanoseconds of times in microseconds: integers, floats, or decimal text.

    InexactTimesError for floats of 2**43 and more, ValueError if any is no time at all. With
    ``texts`` the caller has no better notation to give, and such floats are a ValueError too.
    """
    if not values:
        return np.empty(0, dtype=np.int64)
    types = set(map(type, values))
    if types == {int}:
        micro = np.array(values, dtype=np.int64) if _small(values) else None
        if micro is not None:
            return micro * 1000
    elif types == {float}:
        return _of_floats(np.array(values, dtype=np.float64), texts)
    return np.fromiter(
        (ns_of(value, texts=texts) for value in values), dtype=np.int64, count=len(values)
    )


def ns_of(value: object, *, texts: bool = False) -> int:
    """One time, as ``whole_ns`` reads it."""
    if type(value) is int:
        result = value * 1000
    elif type(value) is float:
        result = int(_of_floats(np.array([value]), texts)[0])
    elif type(value) is str:
        result = _of_text(value)
    else:
        raise ValueError(f"{value!r} is no time")
    if not -MAX_NS <= result <= MAX_NS:
        raise ValueError(f"{value!r} us is out of range")
    return result


def _small(values: list[object]) -> bool:
    return max(values) <= MAX_NS // 1000 and min(values) >= -MAX_NS // 1000  # type: ignore[type-var]


def _of_floats(micro: np.ndarray, texts: bool) -> np.ndarray:
    if not np.isfinite(micro).all():
        raise ValueError("a time is not finite")
    if (np.abs(micro) >= EXACT_US).any():
        if texts:
            raise ValueError("a time is too large")
        raise InexactTimesError
    whole = np.floor(micro)
    return whole.astype(np.int64) * 1000 + np.rint((micro - whole) * 1000).astype(np.int64)


def _of_text(text: str) -> int:
    if text[-4:-3] == "." and (digits := text[:-4] + text[-3:]).isdecimal() and len(digits) < 20:
        return int(digits)  # three decimals, as profilers write them
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no time") from error
    if not number.is_finite() or (number and number.adjusted() > 18):
        raise ValueError(f"{text!r} is out of range")
    return round(number * 1000)
