"""What all parts of the check share, so that their rows can be compared."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.attention.specs import SparseSpec

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        **QWEN,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        **QWEN,
    },
}


NO_LIGER = "skipped: needs a GPU and liger-kernel"
NO_TORCHAO = "skipped: needs torchao"


@dataclass(frozen=True, slots=True)
class Setting:
    """One check: shape, device, contexts, batches, and the file its rows go to."""

    folder: Path
    shape: str
    device: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rows: Path

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def has_liger(self) -> bool:
        """On CPUs Liger's kernels do not run."""
        return self.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def batch(self) -> int:
        return 4 if self.small else 16

    @property
    def new_tokens(self) -> int:
        return 16 if self.small else 128

    @property
    def rule(self) -> SparseSpec:
        """Block top-k with a budget smaller than every context."""
        return SparseSpec(blocks=3 if self.small else 32)

    def rule_of(self, kind: str) -> SparseSpec:
        """The rule of a kind of sparse actor."""
        if kind != "sparse block":
            return self.rule
        return SparseSpec(
            blocks=self.rule.blocks, prompt="block", prompt_block=32 if self.small else 128
        )

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.small else torch.bfloat16

    def add(self, part: str, row: Row) -> None:
        """Append a row; rows stay even if the part fails later."""
        with self.rows.open("a") as file:
            file.write(json.dumps({"part": part, **row}) + "\n")
