"""Stand-ins for what only GPUs have."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def cpu(monkeypatch):
    """vLLM's transfer without CUDA: streams and synchronisation do nothing. The groups by port."""
    from transfer_ends import Group
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor, sparse_nccl_engine
    from vllm.model_executor.model_loader import reload

    groups = {}
    lock = threading.Lock()

    def group(info):
        with lock:
            return groups.setdefault(info.master_port, Group(info.world_size))

    streams = (SimpleNamespace(synchronize=lambda: None),) * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    load = sparse_nccl_engine.load_checkpoint_weight_patches

    def load_alone(*args):
        with lock:  # it replaces torch's copy_ meanwhile, and ranks are threads here
            return load(*args)

    monkeypatch.setattr(sparse_nccl_engine, "load_checkpoint_weight_patches", load_alone)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group(info).end(0))
    monkeypatch.setattr(
        nccl_engine,
        "worker_init_process_group",
        lambda info, parallel: group(info).end(info.rank_offset + parallel.rank),
    )
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    return groups
