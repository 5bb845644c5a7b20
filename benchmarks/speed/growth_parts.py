"""What `growth.py` measures: each function takes sizes and gives (processor seconds, MiB).

Sizes are those of `growth.py: BASE`. A function that loads torch runs in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

Measured = tuple[float, float]
DEADLINE_S = 600.0


def peak_rss() -> int:
    """Bytes, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fresh_model(sizes: dict[str, Any], folder: Path) -> str:
    """A random model of these sizes; its folder."""
    from benchmarks.speed.prefix_sharing import ALPHABET
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    spec = FreshModelSpec(
        hidden_size=sizes["width"],
        intermediate_size=3 * sizes["width"],
        layers=sizes["layers"],
        heads=4,
        kv_heads=2,
        head_dim=sizes["width"] // 4,
        vocab_size=sizes["vocabulary"],
    )
    return str(build_fresh_model(folder / "m", ALPHABET, spec, seed=0, max_len=4096))


def learner_step(sizes: dict[str, Any], rounds: int) -> Measured:
    """Forward and backward of a step of the learner, and how far the peak lies above the memory
    before it."""
    import psutil
    import torch

    from benchmarks.speed.prefix_sharing import step
    from rlcore.learner.build import share_prefixes
    from rlcore.learner.packing import PassCosts, pack
    from rlcore.learner.policy import Policy, load_causal_lm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lm = load_causal_lm(fresh_model(sizes, Path(folder)), "float32", "sdpa")
    assert share_prefixes(lm) is None
    policy, episodes = Policy(lm.train()), episodes_of_turns(sizes)
    micro = pack(episodes, 4096, "sorted", costs=PassCosts.of(lm))
    tokens = sum(s.scored for parts in episodes for s in parts)
    before = psutil.Process().memory_info().rss
    seconds = min(step(policy, micro, tokens) for _ in range(rounds))
    return seconds, (peak_rss() - before) / 2**20


def episodes_of_turns(sizes: dict[str, Any]) -> list[Any]:
    """Groups with one prompt each. An episode has `turns` answers of `response` tokens, each but
    the last with as many observed ones after it; with `rewritten`, each turn is a record of its
    own, whose prompt is all that was before it."""
    import numpy as np

    from rlcore.learner.sequences import TokenSequence

    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(sizes["groups"]):
        prompt = rng.integers(5, 40, sizes["prompt"])
        for _ in range(sizes["samples"]):
            ids, sampled, parts = [prompt], [np.zeros(len(prompt), bool)], []
            for turn in range(sizes["turns"]):
                ids.append(rng.integers(5, 40, sizes["response"]))
                sampled.append(np.ones(sizes["response"], bool))
                if sizes["rewritten"] or turn == sizes["turns"] - 1:
                    parts.append(TokenSequence(np.concatenate(ids), np.concatenate(sampled)))
                if sizes["rewritten"]:
                    sampled[-1] = np.zeros(sizes["response"], bool)
                ids.append(rng.integers(5, 40, sizes["response"]))
                sampled.append(np.zeros(sizes["response"], bool))
            episodes.append(tuple(parts))
    return episodes


def ranks_step(ranks: int, sizes: dict[str, Any]) -> Measured:
    """An optimizer step of so many DeepSpeed ranks at ZeRO-1 on one batch, and the largest peak of
    a rank above its memory before: of the rank with most of both."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        context.Pool(ranks, maxtasksperchild=1) as pool,
    ):
        model = fresh_model(sizes, Path(folder))
        jobs = [(rank, ranks, port, model, sizes) for rank in range(ranks)]
        found = pool.starmap_async(_one_rank, jobs, chunksize=1).get(DEADLINE_S)
    return max(s for s, _ in found), max(m for _, m in found)


def _one_rank(rank: int, ranks: int, port: int, model: str, sizes: dict[str, Any]) -> Measured:
    import psutil

    from rlcore.learner.rank import LearnerRank
    from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
    from rlcore.objectives.specs import ObjectiveSpec
    from rlcore.testing.records import make_sampling

    job = LearnerJob(
        model_path=model,
        learner=LearnerSpec(ranks=ranks, zero_stage=1, micro_batch_tokens=4096),
        objective=ObjectiveSpec(),
        corrections={},
        sampling=make_sampling(logprobs_k=1),
        total_steps=100,
        run_seed=0,
        pad_id=0,
    )
    one = LearnerRank(job, RankPlace(rank, ranks, "127.0.0.1", port, DEADLINE_S))
    mine = random_groups(sizes)[rank::ranks]
    before, seconds = psutil.Process().memory_info().rss, []
    for step in range(3):  # the first makes the optimizer's state
        begun = time.process_time()
        one.begin_phase([mine])
        one.train_step(step)
        seconds.append(time.process_time() - begun)
    return min(seconds), (peak_rss() - before) / 2**20


def random_groups(sizes: dict[str, Any]) -> list[Any]:
    """The records of a step's groups."""
    import numpy as np

    from rlcore.testing.records import make_group, make_trajectory

    rng, groups = np.random.default_rng(0), []
    for group in range(sizes["groups"]):
        prompt = rng.integers(5, 40, sizes["prompt"]).tolist()
        samples = []
        for sample in range(sizes["samples"]):
            answer = rng.integers(5, 40, sizes["response"]).tolist()
            logp = np.full(len(answer), -3.6, np.float32)
            samples.append(make_trajectory(group, sample, turns=[(prompt, answer)], logp_inf=logp))
        rewards = rng.integers(0, 2, sizes["samples"]).astype(float).tolist()
        groups.append(make_group(samples, rewards))
    return groups


def publication(parameters: float, actors: int) -> Measured:
    """Publishing so many bfloat16 parameters to so many actors of one node through an object store,
    all of them together, and the memory that it takes beside the weights of both sides.

    The store copies a blob that is put, as Ray's does, and lends it out."""
    import psutil
    import torch

    from rlcore.weights.buckets import ObjectStoreTransport
    from rlcore.weights.manifest import make_manifest, tensor_checksum, verify_checksums

    torch.set_num_threads(1)
    side = 1024
    shapes = {f"layers.{i}.weight": (side, side) for i in range(int(parameters) // side**2)}
    tensors = {n: torch.full(s, 0.5, dtype=torch.bfloat16) for n, s in shapes.items()}
    engines = [{n: torch.zeros_like(t) for n, t in tensors.items()} for _ in range(actors)]
    store: list[Any] = []

    def put(blob: Any) -> int:
        store.append(blob.copy())
        return len(store) - 1

    transport = ObjectStoreTransport(put, store.__getitem__, bucket_bytes=64 << 20)
    seconds, before = [], psutil.Process().memory_info().rss
    for version in range(5):
        store.clear()
        begun = time.process_time()
        manifest = make_manifest(version, tensors, full=False, seed=0)
        handle = transport.publish(manifest, tensors.items())
        for engine in engines:
            for bucket in transport.receive(manifest, handle):
                for name, tensor in bucket.items():
                    engine[name].copy_(tensor)
            of_engine = {name: tensor_checksum(engine[name]) for name in manifest.checksums}
            verify_checksums(manifest, of_engine)
        seconds.append(time.process_time() - begun)
    return min(seconds), (peak_rss() - before) / 2**20


def fleet_step(actors: int) -> Measured:
    """A simulated step with so many actors, and the memory of the whole process."""
    from rlcore.advisor.planner.forecast import forecast
    from rlcore.advisor.planner.run import PlannedFleet
    from rlcore.advisor.planner.specs import ActorRates, LearnerRates, LengthSpec, Rates
    from rlcore.loop.specs import ScheduleSpec

    rates = Rates(
        learner=LearnerRates(step_s=1.0, token_s=0.0),
        lengths=LengthSpec(prompt=64, median=32),
        grade_s=1e-6,
    )
    steps = 8
    schedule = ScheduleSpec(
        steps=steps, groups_per_step=4 * actors, max_staleness=1, on_publish="in_flight"
    )
    fleet = PlannedFleet(
        {"bf16": actors}, {"bf16": ActorRates()}, rates, schedule, samples=8, max_tokens=64
    )
    fleet = replace(fleet, schedule=schedule.model_copy(update={"wait_data_timeout_s": 1e9}))
    begun = time.process_time()
    forecast(fleet)
    return (time.process_time() - begun) / steps, peak_rss() / 2**20
