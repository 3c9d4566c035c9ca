"""Readable numbers: seconds, bytes, percent and ratios."""

from __future__ import annotations

from collections.abc import Sequence

from edgegossip.contract.metrics import MetricSpec

NO_BREAK = "\u00a0"
UNKNOWN = "\u2013"


def number(value: float | None) -> str:
    """Format a number: three significant digits below 100, whole with commas from 100 on.

    >>> number(12.345), number(1437), number(0.5), number(None) == UNKNOWN
    ('12.3', '1,437', '0.5', True)
    """
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Format a duration, always in seconds for easy comparison.

    >>> seconds(1234.5).split()
    ['1,234', 's']
    """
    return UNKNOWN if value is None else f"{number(value)}{NO_BREAK}s"


def percent(value: float | None, digits: int = 1, *, is_in_column: bool = False) -> str:
    """Format a share in [0, 1]; numbers in a column have equally many decimals.

    >>> percent(0.95).split(), percent(0.9512).split()
    (['95', '%'], ['95.1', '%'])
    >>> percent(0.95, is_in_column=True).split()
    ['95.0', '%']
    """
    if value is None:
        return UNKNOWN
    text = f"{100 * value:.{digits}f}"
    return (text if is_in_column else text.removesuffix(".0")) + f"{NO_BREAK}%"


def metric_value(
    value: float | None, metric: MetricSpec, digits: int = 1, *, is_in_column: bool = False
) -> str:
    """Format a metric's value: a share as percent, other values with four digits and a unit.

    >>> error = MetricSpec(name="mean error", unit="years", higher_is_better=False)
    >>> metric_value(1.23456, error).split()
    ['1.235', 'years']
    """
    if metric.is_share:
        return percent(value, digits, is_in_column=is_in_column)
    if value is None:
        return UNKNOWN
    text = number(value) if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text}{NO_BREAK}{metric.unit}" if metric.unit else text


def named_value(value: float | None, metric: MetricSpec) -> str:
    """Format a metric's value with its name.

    >>> named_value(2.5, MetricSpec(name="perplexity", higher_is_better=False))
    'perplexity 2.5'
    """
    text = metric_value(value, metric)
    return f"{text} {metric.name}" if metric.is_share else f"{metric.name} {text}"


def data_size(num_bytes: float | None) -> str:
    """Format bytes with a decimal prefix.

    >>> data_size(12).split(), data_size(123_456).split(), data_size(2.5e9).split()
    (['12', 'B'], ['123', 'kB'], ['2.5', 'GB'])
    """
    return _with_prefix(num_bytes, "B")


def energy(joules: float | None) -> str:
    """Format joules with a prefix.

    >>> energy(12.34).split(), energy(580.1).split(), energy(2.5e6).split()
    (['12.3', 'J'], ['580', 'J'], ['2.5', 'MJ'])
    """
    return _with_prefix(joules, "J")


def _with_prefix(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    for exponent, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        # 999.6 kB would round to 1,000 kB.
        if value >= 0.9995 * 10**exponent:
            return f"{number(value / 10**exponent)}{NO_BREAK}{prefix}{unit}"
    return f"{number(value)}{NO_BREAK}{unit}"


def times(value: float | None) -> str:
    """Format a ratio.

    >>> times(3.14159).split()[0]
    '3.1'
    """
    if value is None:
        return UNKNOWN
    return f"{number(value) if value >= 100 else f'{value:.1f}'}{NO_BREAK}\u00d7"


def points(value: float | None) -> str:
    """Format a difference of shares, in percentage points.

    >>> points(0.0078).split(), points(-0.001).split()
    (['0.78', 'pp'], ['-0.10', 'pp'])
    """
    return UNKNOWN if value is None else f"{100 * value:.2f}{NO_BREAK}pp"


def written(value: str | float | None, unit: str, *, is_in_column: bool = False) -> str:
    """Format a value in its unit: text, number, seconds, bytes, joules, percent, points, times.

    >>> written(0.5, "percent").split(), written("LeNet-5", "text")
    (['50', '%'], 'LeNet-5')
    """
    if isinstance(value, str):
        return value
    if unit == "percent":
        return percent(value, is_in_column=is_in_column)
    ways = {
        "number": number,
        "seconds": seconds,
        "bytes": data_size,
        "joules": energy,
        "points": points,
        "times": times,
    }
    return ways.get(unit, number)(value)


def listing(words: Sequence[str]) -> str:
    """Join words as a list in a sentence.

    >>> listing(["a"]), listing(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def capitalized(words: str) -> str:
    """Capitalize `words` for the beginning of a sentence.

    >>> capitalized("worker 3")
    'Worker 3'
    """
    return words[:1].upper() + words[1:]
