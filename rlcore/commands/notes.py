"""What commands without a metrics logger say."""

from __future__ import annotations


def note(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(text, flush=True)
