"""Small trajectories and a simulated run for the buffer's tests."""

import random
from dataclasses import dataclass, field

import numpy as np

from rlcore.buffer import ReplayBuffer
from rlcore.types import Trajectory


def trajectory(
    group_id, sample_index, *, prompt_id="digits/train/0", version=0, reward=1.0, status="ok", tokens=2, **kw
):
    """A scored trajectory of `tokens` response tokens, all of one version (or of the versions given)."""
    versions = np.full(tokens, version, np.int32) if np.isscalar(version) else np.asarray(version, np.int32)
    return Trajectory(
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(len(versions), dtype=np.int32) + sample_index,
        logp_inf=np.full(len(versions), -0.5, np.float32),
        topk_ids=np.zeros((len(versions), 2), np.int32),
        topk_logp=np.full((len(versions), 2), -0.7, np.float32),
        token_version=versions,
        actor_id="actor-0",
        actor_kind="bf16",
        group_id=group_id,
        prompt_id=prompt_id,
        sample_index=sample_index,
        finish_reason=kw.pop("finish_reason", "stop"),
        score_status=status,
        reward=reward if status == "ok" else None,
        **kw,
    )


def fill(buffer, group_ids, n, *, prompt_id="digits/train/0", version=0, rewards=None):
    """Deliver all n samples of these groups."""
    for g in group_ids:
        values = rewards if rewards is not None else [float(i % 2) for i in range(n)]
        buffer.add([trajectory(g, i, version=version, reward=values[i], prompt_id=prompt_id) for i in range(n)])


@dataclass
class Run:
    """A controller, actors, publishes and a learner around a real buffer, their order of events drawn from a seed.

    Samples finish in random order and span publishes; actors die and their samples are asked for again (sometimes the
    first copy arrives all the same); publishes land late; batches are sometimes put back and taken again. Unless the
    schedule is synchronous, the next batch may be taken before the one being trained on is committed. What a sample
    contains depends on (group, sample) only.
    """

    buffer: ReplayBuffer
    seed: int
    steps: int
    lag: int = 3  # events a publish may take
    death: float = 0.02
    bad_scores: float = 0.05
    reward_levels: int = 2  # 1: every group is filtered
    tasks: tuple[str, ...] = ("digits",)
    batches: list[list[int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def play(self):
        """Run to the last step; fails if a token is too old or if nothing can happen any more."""
        self.rng = random.Random(self.seed)
        self.flight = []  # (group, sample, prompt, version at its start)
        self.version = self.served = 0
        self.publishes = []  # [events left, version]
        self.taken = []  # batches not trained on yet, the next step's first
        while self.version < self.steps:
            events = [self.finish] * min(4, len(self.flight))
            events += [self.publish] if self.publishes else []
            events += [self.admit] if self.buffer.room(self.served) else []
            at_once = 1 if self.buffer.bound.synchronous else 2
            can_take = len(self.taken) < at_once and self.buffer.ready(self.buffer.next_step)
            events += [self.take] if can_take else []
            events += [self.learn] if self.taken else []
            assert events, f"deadlock: {self.buffer.waiting_for(self.version)}"
            self.rng.choice(events)()
            self.buffer.check()
        return self

    def admit(self):
        count = self.rng.randint(1, self.buffer.room(self.served))
        first = self.buffer.ledger.admitted
        prompts = [f"{self.tasks[i % len(self.tasks)]}/train/{i}" for i in range(first, first + count)]
        ids = self.buffer.admit(prompts, self.served)
        self.request(ids)

    def request(self, ids):
        for missing in self.buffer.reissue(ids):
            key = (missing.group_id, missing.prompt_id)
            self.flight += [(*key, index, self.served) for index in missing.sample_indices]

    def finish(self):
        if self.rng.random() < self.death:  # half of what an actor held is lost, the other half arrives twice
            ids = {f[0] for f in self.flight[::2]}
            self.flight = self.flight[1::2]
            return self.request(ids)
        group, prompt, index, start = self.flight.pop(self.rng.randrange(len(self.flight)))
        content = random.Random(f"{group}:{index}")
        status = "error" if content.random() < self.bad_scores else "ok"
        reward = float(content.randrange(self.reward_levels))
        versions = [start, self.served]
        self.buffer.add([trajectory(group, index, prompt_id=prompt, version=versions, reward=reward, status=status)])

    def take(self):
        self.taken.append(self.buffer.take(self.buffer.next_step))
        if self.rng.random() < 0.1:
            self.buffer.rollback(self.version)
            self.take_again()

    def take_again(self):
        """What was put back is handed out as it was."""
        again = [self.buffer.take(self.version + i) for i in range(len(self.taken))]
        assert [[g.group_id for g in batch] for batch in again] == [[g.group_id for g in batch] for batch in self.taken]

    def learn(self):
        groups = self.taken.pop(0)
        ages = [self.version - int(v) for g in groups for t in g.trajectories for v in t.token_version]
        assert min(ages) >= 0 and max(ages) <= self.buffer.bound.cap, ages
        self.staleness.append(max(ages))
        self.batches.append([g.group_id for g in groups])
        self.buffer.commit(self.version)
        self.version += 1
        if self.version % self.buffer.bound.steps_per_publish == 0:
            self.publishes.append([self.rng.randint(0, self.lag), self.version])
        self.buffer.set_versions(self.served, self.version)

    def publish(self):
        if self.publishes[0][0] > 0:
            self.publishes[0][0] -= 1
            return
        self.served = self.publishes.pop(0)[1]
        self.buffer.set_versions(self.served, self.version)
