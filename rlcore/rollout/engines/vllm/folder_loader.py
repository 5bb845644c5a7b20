"""Which weight files vLLM reads of a model folder."""

from __future__ import annotations

from typing import Any

from vllm import __version_tuple__
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

    def _prepare_weights(self, model_name_or_path: str, *_: Any, **__: Any) -> Any:
        files = [str(f) for f in weight_files(model_name_or_path)]
        if __version_tuple__ < (0, 27):  # of the GPU kit: it finds the index by itself
            return model_name_or_path, files, True
        return model_name_or_path, files, True, INDEX_FILE
