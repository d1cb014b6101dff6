"""Line charts as inline SVG. Colours are classes of the page around them, so that they follow its theme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH = 640
HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
_LEAST_LOG = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: a value per interval, `None` where there is none. `style` is a CSS class."""

    name: str
    style: str
    values: Sequence[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The vertical axis. `most` fixes its end; otherwise it follows the values."""

    say: Callable[[int], str]
    logarithmic: bool = False
    most: int | None = None


def line_chart(lines: Sequence[Line], *, interval_s: float, axis: Axis, described: str) -> str:
    """An SVG element. Each interval has a tooltip with all values."""
    count = max((len(line.values) for line in lines), default=0)
    values = [value for line in lines for value in line.values if value is not None]
    ticks = _log_ticks(values) if axis.logarithmic else _ticks(axis.most or max(values, default=1))
    low, high = (_place(ticks[0], axis), _place(ticks[-1], axis))
    span_s = count * interval_s

    def x(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * seconds / max(span_s, 1e-9)

    def y(value: float) -> float:
        share = (_place(value, axis) - low) / max(high - low, 1e-9)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(max(share, 0.0), 1.0)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(described, quote=True)}">',
    ]
    for tick in ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{at}" dy="0.32em">{axis.say(tick)}</text>')
    parts.extend(
        f'<text class="tick mid" x="{x(minute * 60):.1f}" y="{HEIGHT - 14}">{minute:g}</text>'
        for minute in _minutes(span_s)
    )
    parts.append(f'<text class="tick end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}">minutes</text>')
    for line in lines:
        parts.extend(_drawn(line, lambda index: x((index + 0.5) * interval_s), y))
    for index in range(count):
        told = [f"minute {index * interval_s / 60:.1f}"]
        for line in lines:
            value = line.values[index] if index < len(line.values) else None
            told.append(f"{line.name}: {'–' if value is None else axis.say(value)}")  # noqa: RUF001 - a dash
        parts.append(
            f'<rect class="hit" x="{x(index * interval_s):.1f}" y="{_TOP}" '
            f'width="{x(interval_s) - x(0):.1f}" height="{HEIGHT - _TOP - _BOTTOM}">'
            f"<title>{escape(chr(10).join(told))}</title></rect>"
        )
    parts.append("</svg>")
    return "".join(parts)


def _drawn(line: Line, x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    """A path per unbroken stretch; a value without neighbours is a dot."""
    parts: list[str] = []
    stretch: list[str] = []

    def close() -> None:
        if len(stretch) == 1:
            at_x, at_y = stretch[0].split(",")
            parts.append(f'<circle class="dot {line.style}" cx="{at_x}" cy="{at_y}" r="2.5"/>')
        elif stretch:
            parts.append(f'<polyline class="line {line.style}" points="{" ".join(stretch)}"/>')
        stretch.clear()

    for index, value in enumerate(line.values):
        if value is None:
            close()
        else:
            stretch.append(f"{x(index):.1f},{y(value):.1f}")
    close()
    return parts


def _place(value: float, axis: Axis) -> float:
    return log10(max(value, _LEAST_LOG)) if axis.logarithmic else value


def _ticks(most: int) -> list[int]:
    """From 0 to a round number at or above `most`, in four or five steps."""
    step = 1
    for size in (10**power * digit for power in range(12) for digit in (1, 2, 5)):
        step = size
        if most <= size * 5:
            break
    return list(range(0, step * (ceil(max(most, 1) / step) + 1), step))


def _log_ticks(values: Sequence[int]) -> list[int]:
    """Powers of ten around the values."""
    least = max(min(values, default=1), 1)
    most = max(max(values, default=10), least + 1)
    return [int(10**power) for power in range(floor(log10(least)), ceil(log10(most)) + 1)]


def _minutes(span_s: float) -> list[float]:
    minutes = span_s / 60
    step = next((one for one in (0.5, 1, 2, 5, 10, 15, 30, 60, 120) if minutes / one <= 8), 240)
    return [step * index for index in range(int(minutes / step) + 1)]
