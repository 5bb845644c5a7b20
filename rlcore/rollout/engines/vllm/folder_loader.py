"""Which weight files vLLM reads of a model folder."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rlcore.models.folder import INDEX_FILE, weight_files

LOAD_FORMAT = "rlcore_folder"


@register_model_loader(LOAD_FORMAT)
class FolderLoader(DefaultModelLoader):
    """Reads the files of `weight_files` and no others.

    vLLM's own loader reads every safetensors file of a folder without an index, and with "auto" it
    would unpickle other formats.
    """

    def _prepare_weights(
        self, model_name_or_path: str, *_: Any, **__: Any
    ) -> tuple[str, list[str], bool, str]:
        files = [str(f) for f in weight_files(model_name_or_path)]
        return model_name_or_path, files, True, INDEX_FILE
