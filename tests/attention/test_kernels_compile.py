"""Every Triton kernel compiles to machine code for the GPUs of the GPU experiments: triton's passes
and the assembler of its wheel need no GPU. What the code computes is tested under the interpreter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rlcore"
KERNEL = re.compile(r"^@triton\.jit\ndef (\w+_kernel)\(", re.MULTILINE)
SHARED = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}  # bytes a program may have

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from rlcore.attention import kept_pages_gpu as kept
from rlcore.learner import fused_head_gpu as head
from rlcore.rollout.engines.vllm import sparse_kernel_gpu as sparse

BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
TILES = {"TILE": sparse.TILE, "TILES": sparse.TILES}

def select(pages, width):
    types = (I32, I64, I64, F32, I32, "i32", "i32", "i32", "i32")
    return sparse._select_kernel, types, {"PAGES": pages, "WIDTH": width}

def score(query, summaries, group, dim):
    types = (query, summaries, I32, I64, F32, "i32", "i32", "i32", "i32")
    return sparse._score_kernel, types, {"GROUP": group, "DIM": dim, **TILES}

def summarise(dtype, size, dim):
    types = (dtype, dtype, I64, "i64", "i32", "i32", "i32", "i32")
    sizes = {"SIZE": size, "HALVINGS": size.bit_length() - 1, "DIM": dim}
    return sparse._summarise_kernel, types, sizes

def scores(dtype, slots, sketch):
    outs = F32, F32, F32, F32, F32, I32, F32
    types = (dtype, dtype, I64, F32, *outs, "i32", "i32", "i32", "fp32")
    sizes = {"ROWS": head.ROWS, "TILE": head.TILE, "STEP": head.STEP, "SLOTS": slots}
    return head._head_kernel, types, {**sizes, "TOPK": slots > 16, "SKETCH": sketch}

MASK = (kept._mask_kernel, (F32, I64, I64, "*i8", "i32", "i32"))
CASES = [
    (*MASK, {"PAGES": 1}), (*MASK, {"PAGES": 1024}),
    select(1, 1), select(1024, 512),
    score(BF16, BF16, 2, 128), score(F32, F32, 7, 32),
    summarise(BF16, 16, 128), summarise(F32, 16, 64),
    scores(BF16, 32, True),
]
for capability in (80, 90, 100):
    target = GPUTarget("cuda", capability, 32)
    for kernel, types, sizes in CASES:
        names = kernel.arg_names
        kinds = [*types, *["constexpr"] * len(sizes)]
        fixed = {(names.index(name),): size for name, size in sizes.items()}
        source = ASTSource(fn=kernel, signature=dict(zip(names, kinds)), constexprs=fixed)
        made = triton.compile(source, target=target, options={"num_warps": 4})
        code = made.asm["cubin"]
        about = [kernel.__name__, str(capability), made.metadata.shared, code[:4] == b"\\x7fELF"]
        print(json.dumps(about))
"""


@pytest.mark.processes
def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(with_triton):
    found = [json.loads(line) for line in with_triton(COMPILE).splitlines()]
    written = {name for file in PACKAGE.rglob("*.py") for name in KERNEL.findall(file.read_text())}
    for capability, most in SHARED.items():
        mine = [about for about in found if about[1] == capability]
        assert {name for name, *_ in mine} == written
        assert all(shared <= most and compiled for _, _, shared, compiled in mine)
