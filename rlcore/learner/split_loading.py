"""A causal LM of which no process ever holds more than one whole tensor: each is read, and divided
among the ranks before the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlcore.learner.ranks import is_first_rank
from rlcore.models.folder import read_shapes, weight_files
from rlcore.weights.experts import single_shapes

# Takes a parameter that is whole on rank 0, and whose shape all ranks have; leaves each its part.
Split = Callable[[nn.Parameter], None]


class UnsplitNamesError(ValueError):
    """A folder whose weights have other names than in the model that transformers makes of it."""


def load_split(path: str | Path, config: Any, split: Split, device: torch.device) -> nn.Module:
    """The model of a folder, its parameters divided by `split`. Collective.

    `config`: its transformers configuration, with dtype and attention set. Rank 0 reads. Raises
    UnsplitNamesError, before anything is read.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # buffers are computed by the constructor and saved nowhere, so they are made whole
    with no_init_weights(), init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    lm.tie_weights()
    expected: dict[str, tuple[int, ...]] = {}
    for name, p in lm.named_parameters():
        expected |= single_shapes(name, tuple(p.shape))
    found = read_shapes(path)
    if found != expected:
        odd = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
        raise UnsplitNamesError(
            f"the folder's weights do not belong to {type(lm).__name__} by name: {odd[0]}"
        )
    with _open_folder(path) as read:
        for name, p in lm.named_parameters():
            whole = _whole(name, p, read if is_first_rank() else None, device)
            # in place, so that tied weights stay tied; `data` cannot change device
            torch.utils.swap_tensors(p, nn.Parameter(whole, p.requires_grad))
            split(p)
    for module in lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return lm.eval()


@contextmanager
def _open_folder(path: str | Path) -> Iterator[Callable[[str], Tensor]]:
    """A context with a function that reads single tensors of a model folder by name."""
    with ExitStack() as stack:
        places: Mapping[str, Any] = {
            name: file
            for opened in weight_files(path)
            for file in [stack.enter_context(safe_open(str(opened), framework="pt"))]
            for name in file.keys()  # noqa: SIM118 (not a dict)
        }
        yield lambda name: places[name].get_tensor(name)


def _whole(
    name: str, p: nn.Parameter, read: Callable[[str], Tensor] | None, device: torch.device
) -> Tensor:
    """The parameter's values in its dtype; where `read` is None, memory for them."""
    out = torch.empty(p.shape, dtype=p.dtype, device=device)
    if read is not None:
        singles = single_shapes(name, tuple(p.shape))
        rows = out.view(len(singles), *next(iter(singles.values()))) if len(singles) > 1 else [out]
        for row, single in zip(rows, singles, strict=True):
            row.copy_(read(single))
    return out
