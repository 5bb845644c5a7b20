"""Tensors in shared memory: other processes read them, and nothing stays after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from timing import deadline

from rlcore.rollout.engines.vllm.weight_loader import shared_file

pytestmark = pytest.mark.processes

READER = """
import sys
from safetensors.torch import load_file
print(load_file(sys.argv[1])["w"].sum().item())
"""
OWNER = """
import time, torch
from rlcore.rollout.engines.vllm.weight_loader import shared_file
with shared_file({"w": torch.ones(8 << 20)}) as path:
    print(path, flush=True)
    time.sleep(10**6)
"""


def test_another_process_maps_the_tensors():
    with shared_file({"w": torch.full((1000,), 2.0)}) as path:
        read = subprocess.run(
            [sys.executable, "-c", READER, path],
            capture_output=True,
            text=True,
            timeout=deadline(60),
        )
        assert read.stdout.strip() == "2000.0", read.stderr
    assert not Path(path).exists()


def test_a_killed_owner_leaves_nothing_in_shared_memory():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = owner.stdout.readline().strip()
    assert Path(path).stat().st_size > 32 << 20
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert not Path(path).exists() and not list(Path("/dev/shm").glob("rlcore*"))
