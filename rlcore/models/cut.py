"""A smaller model out of a larger one: its embeddings and head, and some of its layers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from rlcore.errors import UserError
from rlcore.files import follow_umask, new_folder
from rlcore.models.folder import INDEX_FILE, read_config, read_weights, weight_files

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def spread(total: int, kept: int) -> list[int]:
    """`kept` of `total` layers at even distances, the first and the last among them.

    Example: spread(30, 4) is [0, 10, 19, 29].
    """
    if kept == 1:
        return [0]
    return [round(i * (total - 1) / (kept - 1)) for i in range(kept)]


def cut_model(model_path: str | Path, folder: str | Path, layers: int) -> Path:
    """Write to `folder`, which must not exist, the model with `layers` of its layers and all of its
    vocabulary; untrained, a start for a draft. Returns the folder.

    Raises UserError for a number of layers that it does not have, and as `read_weights` does.
    """
    from safetensors.torch import save_file

    config = read_config(model_path)
    total = int(config.get("num_hidden_layers", 0))
    if not 0 < layers < total:
        raise UserError(
            f"layers={layers} of model.path={model_path}, which has {total}: give 1 to {total - 1}."
        )
    kept = {old: new for new, old in enumerate(spread(total, layers))}
    weights = {}
    for name, tensor in read_weights(model_path).items():
        found = _LAYER.search(name)
        if found is None:
            weights[name] = tensor
        elif int(found[2]) in kept:
            place = f"{found[1]}layers.{kept[int(found[2])]}."
            weights[f"{name[: found.start()]}{place}{name[found.end() :]}"] = tensor
    config["num_hidden_layers"] = layers
    for name, value in config.items():  # one entry a layer, such as layer_types
        if isinstance(value, list) and len(value) == total:
            config[name] = [value[old] for old in kept]
    others = {INDEX_FILE, "config.json", *(f.name for f in weight_files(model_path))}
    with new_folder(folder) as out:
        for file in Path(model_path).iterdir():
            if file.is_file() and file.name not in others:
                shutil.copy(file, out / file.name)
        (out / "config.json").write_text(json.dumps(config, indent=1))
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        follow_umask(out / "model.safetensors")
    return Path(folder)
