"""The parts `offload` and `attention` of `check.py`: a learner's rank on one GPU. A small model is
trained for two steps at every ZeRO stage and with every place of states and parameters, its second
step taken again from the checkpoint that the first setting wrote after one; and by every kernel of
attention."""

from __future__ import annotations

import gc
import math
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from setting import Row, Setting

HOST = {"optimizer": "cpu"}
ATTENTION = ("sdpa", "varlen", "fa4")
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (3, {}),
    "optimizer on the host": (3, HOST),
    "optimizer and parameters on the host": (3, {**HOST, "parameters": "cpu"}),
    "ZeRO-2": (2, {}),
    "ZeRO-1": (1, {}),
    "optimizer on NVMe": (3, {"optimizer": "nvme"}),
    "optimizer on NVMe, parameters on the host": (3, {"optimizer": "nvme", "parameters": "cpu"}),
}
GIB = 2**30
ALPHABET = "0123456789=+"


def offload(s: Setting) -> None:
    """A row for each setting: what differs from the first one, and its memory."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    model = _model(s)
    saved = s.folder / "trained_state"
    swapped = AsyncIOBuilder().is_compatible()
    reference: Row = {}
    for name, (stage, places) in SETTINGS.items():
        if places.get("optimizer") == "nvme":
            if not swapped:
                s.add("offload", {"setting": name, "what": "skipped: no libaio here"})
                continue
            places = {**places, "nvme_path": str(s.folder / "swapped")}
        found = _trained(s, model, stage, places, saved)
        reference = reference or found
        row = {k: v for k, v in found.items() if k not in ("start", "one", "weights", "resumed")}
        row["at the start"] = _apart(found["start"], reference["start"])
        row["after one step"] = _apart(found["one"], reference["one"])
        row["share of it above 1e-6"] = _share(found["one"], reference["one"])
        row["after two"] = _apart(found["weights"], reference["weights"])
        row["after resuming"] = _apart(found["resumed"], reference["weights"])
        s.add("offload", {"setting": name, **row})


def attention(s: Setting) -> None:
    """A row for each kernel: its two steps, and how far its weights are from the first kernel's."""
    from rlcore.errors import UserError

    model = _model(s)
    # beyond a kernel's tile, and two sequences of a micro-batch
    steps = [_groups(seed, groups=1 if s.small else 8, tokens=400) for seed in range(2)]
    # a group's prompts would be computed once, by FlexAttention
    own = {"share_prefix": "off", "micro_batch_tokens": 1024}
    reference: Row = {}
    for name in ATTENTION[:1] if s.small else ATTENTION:
        job = _job(s, model, 1, {}, attention=name, **own)
        try:
            one = _begun(job)
        except UserError as e:  # such as a wheel without that kernel
            s.add("attention", {"by": name, "what": f"failed: {e}"})
            continue
        norms, begun = [], time.monotonic()
        for i, groups in enumerate(steps):
            one.begin_phase([groups])
            norms.append(one.train_step(i)["grad_norm"])
        seconds, weights = time.monotonic() - begun, dict(one.engine.trained_weights())
        del one
        reference = reference or weights
        row = {
            "gradient norms": ", ".join(f"{norm:.7g}" for norm in norms),
            "after two": _apart(weights, reference),
            "share of it above 1e-6": _share(weights, reference),
            "both steps s": seconds,
        }
        s.add("attention", {"by": name, **row})


def _model(s: Setting) -> str:
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    size = 512 if s.small else 1024
    shape = FreshModelSpec(
        hidden_size=size,
        layers=2 if s.small else 6,
        heads=8,
        kv_heads=4,
        head_dim=size // 8,
        intermediate_size=4 * size,
    )
    return str(build_fresh_model(s.folder / "trained", ALPHABET, shape, seed=0, max_len=512))


def rank_of(model: str, *, small: bool, **own: Any) -> Any:
    """One rank at ZeRO-2 that corrects by TIS, with the top 20 log-probs. `own`: of its
    LearnerSpec."""
    from rlcore.corrections.tis import TisSpec
    from rlcore.learner.specs import LearnerJob, LearnerSpec
    from rlcore.objectives.specs import ObjectiveSpec
    from rlcore.testing.records import make_sampling

    dtype = "float32" if small else "bfloat16"
    spec = LearnerSpec(zero_stage=2, num_gpus=0 if small else 1, dtype=dtype, lr=1e-8, **own)
    sampling = make_sampling(logprobs_k=20, max_new_tokens=512)
    job = LearnerJob(model, spec, ObjectiveSpec(), {"tis": TisSpec()}, sampling, 10, 0, 0)
    return _begun(job)


def _begun(job: Any) -> Any:
    from rlcore.learner.rank import LearnerRank
    from rlcore.learner.specs import RankPlace

    return LearnerRank(job, RankPlace(0, 1, "127.0.0.1", _port(), timeout_s=60))


def _trained(s: Setting, model: str, stage: int, places: dict[str, Any], saved: Path) -> Row:
    from rlcore.learner.engines.deepspeed_facts import learner_rank
    from rlcore.models.folder import read_config, read_shapes
    from rlcore.models.sizes import ModelSizes, total

    job = _job(s, model, stage, places)
    steps = [_groups(seed) for seed in range(2)]

    def step(one: Any, which: int) -> dict[str, float]:
        one.begin_phase([steps[which]])
        found: dict[str, float] = one.train_step(which)
        return found

    before = _allocated(s)
    one = _begun(job)
    at_start = dict(one.engine.trained_weights())
    first = step(one, 0)
    after_one = dict(one.engine.trained_weights())
    if not saved.exists():
        one.save(saved)
    if not s.small:
        torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    row = step(one, 1)
    seconds = time.monotonic() - start
    peak = math.nan if s.small else (torch.cuda.max_memory_allocated() - before) / GIB
    weights = dict(one.engine.trained_weights())
    del one
    again = _begun(job)
    again.load(saved)
    step(again, 1)
    sizes = ModelSizes.of(read_config(model), read_shapes(model))
    return {
        "start": at_start,
        "one": after_one,
        "weights": weights,
        "resumed": dict(again.engine.trained_weights()),
        "gradient norms": f"{first['grad_norm']:.7g}, {row['grad_norm']:.7g}",
        "peak GiB": peak,
        "counted GiB": total(learner_rank(sizes, job.learner)) / GIB,
        "step s": seconds,
    }


def _job(s: Setting, model: str, stage: Any, places: dict[str, Any], **own: Any) -> Any:
    from rlcore.learner.engines.deepspeed_specs import OffloadSpec
    from rlcore.learner.specs import LearnerJob, LearnerSpec
    from rlcore.objectives.specs import ObjectiveSpec
    from rlcore.testing.records import make_sampling

    learner = LearnerSpec(
        zero_stage=stage,
        offload=OffloadSpec(**places),
        num_gpus=0 if s.small else 1,
        dtype="bfloat16",
        gradient_checkpointing=True,
        lr=1e-4,
        lr_warmup_steps=0,
        **{"micro_batch_tokens": 512, **own},
    )
    return LearnerJob(
        model_path=model,
        learner=learner,
        objective=ObjectiveSpec(),
        corrections={},
        sampling=make_sampling(logprobs_k=4, max_new_tokens=400),
        total_steps=10,
        run_seed=0,
        pad_id=0,
    )


def _groups(seed: int, groups: int = 32, tokens: int = 12) -> list[Any]:
    """Eight answers to each prompt of four tokens, `tokens` in all, with random rewards."""
    from rlcore.testing.records import make_group, make_trajectory

    rng = np.random.default_rng(seed)
    found = []
    for g in range(100 * seed, 100 * seed + groups):
        drawn = [rng.integers(3, 15, tokens).tolist() for _ in range(8)]
        parts = [
            make_trajectory(g, i, turns=[(ids[:4], ids[4:])], k=4) for i, ids in enumerate(drawn)
        ]
        found.append(make_group(parts, rng.random(8).tolist()))
    return found


def _allocated(s: Setting) -> int:
    gc.collect()
    return 0 if s.small else torch.cuda.memory_allocated()


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of any weight; two steps at this rate move a weight by up to 2e-4."""
    return max(float((w - other[name]).abs().max()) for name, w in one.items())


def _share(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of all weights, the share that differ by more than 1e-6."""
    apart = sum(int(((w - other[name]).abs() > 1e-6).sum()) for name, w in one.items())
    return apart / sum(w.numel() for w in one.values())


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
