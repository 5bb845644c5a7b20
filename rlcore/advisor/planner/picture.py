"""Curves as an SVG image, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 420, 80, 40, 20, 60
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
_TICKS = 5

Curve = Sequence[tuple[float, float]]


def picture(title: str, x_name: str, y_name: str, curves: Mapping[str, Curve]) -> str:
    """Curves over one pair of axes that begin at 0, each with its highest point marked.

    Every curve has at least one point, with coordinates of at least 0.
    """
    right = max(x for curve in curves.values() for x, _ in curve) or 1.0
    top = max(y for curve in curves.values() for _, y in curve) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / right * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_WIDTH / 2, 22, title, "middle"), *_axes(place, right, top)]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, x_name, "middle"))
    parts.append(_text(8, _TOP - 8, y_name, "start"))
    for i, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        parts += _drawn([place(x, y) for x, y in curve], colour)
        parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM - 12 - 16 * i, name, "end", colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(place: object, right: float, top: float) -> list[str]:
    assert callable(place)
    parts = []
    for i in range(_TICKS + 1):
        x, y = right * i / _TICKS, top * i / _TICKS
        (across, floor), (wall, up) = place(x, 0.0), place(0.0, y)
        parts.append(f'<path d="M{wall:.1f} {up:.1f}H{_WIDTH - _RIGHT}" stroke="#d0d7de"/>')
        parts.append(_text(across, floor + 18, f"{x:.3g}", "middle"))
        parts.append(_text(wall - 6, up + 4, f"{y:.3g}", "end"))
    return parts


def _drawn(points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    x, y = min(points, key=lambda p: p[1])  # the highest: y grows downwards
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="{colour}"/>')
    return parts


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#1f2328") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(words)}</text>"
    )
