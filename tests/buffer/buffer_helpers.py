"""Small samples and a simulated run for the buffer's tests."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rlcore.buffer import ReplayBuffer, journal, store
from rlcore.buffer.admission import ByteLimit
from rlcore.buffer.specs import BatchingSpec, SelectionSpec
from rlcore.serialization import dump_trajectory, load_group
from rlcore.testing.records import make_score, make_trajectory

PROMPT = "digits/train/0"


def make_buffer(groups_per_step=1, samples_per_group=2, *, max_bytes=1 << 30, **settings):
    """A buffer of these settings, each handed to the specification that declares it."""
    taken = {
        spec: {name: settings.pop(name) for name in spec.model_fields if name in settings}
        for spec in (BatchingSpec, SelectionSpec)
    }
    return ReplayBuffer(
        BatchingSpec(groups_per_step=groups_per_step, **taken[BatchingSpec]),
        SelectionSpec(**taken[SelectionSpec]),
        samples_per_group=samples_per_group,
        **{"limit": ByteLimit(max_bytes), "run_seed": 0, "keep_samples": 8, **settings},
    )


def load(folder, buffer):
    """Continue from a journal, with all records in this process."""
    journal.restore(buffer, journal.read(folder).snapshot)


def sample(
    group_id,
    sample_index,
    *,
    prompt_id=PROMPT,
    version=0,
    reward=1.0,
    status="ok",
    tokens=2,
    parts=None,
    error="",
    **fields,
):
    """(record, score) of a training sample of `tokens` sampled tokens, or of as many as versions
    are given."""
    count = len(version) if isinstance(version, list) else tokens
    trajectory = make_trajectory(
        group_id,
        sample_index,
        turns=((range(3), range(count)),),
        version=version,
        prompt_id=prompt_id,
        **fields,
    )
    score = make_score(trajectory, reward, status=status, parts=parts or {}, error=error)
    return dump_trajectory(trajectory), score


def deliver(buffer, *samples):
    """Records first, then scores."""
    buffer.add_records([record for record, _ in samples])
    buffer.add_scores([score for _, score in samples])


def fill(buffer, group_ids, n, *, prompt_id=PROMPT, version=0, rewards=None):
    """Deliver all n samples of these groups."""
    for g in group_ids:
        values = rewards if rewards is not None else [float(i % 2) for i in range(n)]
        deliver(
            buffer,
            *(
                sample(g, i, version=version, reward=values[i], prompt_id=prompt_id)
                for i in range(n)
            ),
        )


def ids_of(batch):
    return [group_id for group_id, _ in batch.groups]


def groups_of(buffer, step, batch):
    """The groups of a taken batch, decoded as a learner rank does."""
    return [load_group(stored) for stored in buffer.stored(step, ids_of(batch))]


def give_up(buffer, group_id):
    """Report a group lost for the last time."""
    buffer.lost([group_id], limit=1)


@dataclass
class Run:
    """A controller, actors, graders, publishes and a learner around a real buffer, their order of
    events drawn from a seed.

    Samples finish in random order and span publishes; their records and scores arrive in either
    order, and one of the two is sometimes lost; actors die and their samples are asked for again
    (sometimes the first copy arrives all the same); publishes land late; batches are sometimes put
    back and taken again; the run may stop and go on from a snapshot (`restart`). A phase begins
    when all of its batches are taken. Unless the schedule is synchronous, the next phase's may be
    taken before those being trained on are committed. What a sample contains depends on (group,
    sample) only.
    """

    buffer: ReplayBuffer
    seed: int
    steps: int
    lag: int = 3  # events a publish may take
    death: float = 0.02
    lost_half: float = 0.02
    bad_scores: float = 0.05
    reward_levels: int = 2  # 1: every group is filtered
    restart: float = 0.0
    rebuilt: Callable[[], ReplayBuffer] | None = None  # the buffer of a run that goes on
    tasks: tuple[str, ...] = ("digits",)
    batches: list[list[int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def play(self):
        """Run to the last step; fails if a token is too old or if nothing can happen any more."""
        self.rng = random.Random(self.seed)
        self.draws = itertools.count()
        self.flight = []  # (group, sample, prompt, version at its start)
        self.halves = []  # records and scores on their way, as calls
        self.version = self.served = 0
        self.publishes = []  # [events left, version]
        self.taken = []  # (ids, groups) of batches not trained on yet, the next step's first
        while self.version < self.steps:
            self.rng.choice(self.events())()
            store.metrics(self.buffer)
            if self.rng.random() < self.restart:
                self.go_on()
        return self

    def go_on(self):
        """From a snapshot, with nothing of what was on its way or being trained on. A synchronous
        run publishes what its phase began with, another one what the learner has."""
        saved, bound = journal.snapshot(journal.cut(self.buffer)), self.buffer.batches.bound
        self.buffer = self.rebuilt()
        journal.restore(self.buffer, saved)
        start = bound.phases.start(self.version)
        self.served = start if bound.synchronous else self.version
        self.publishes, self.halves, self.flight, self.taken = [], [], [], []
        self.buffer.set_versions(self.served, self.version)
        self.request(None)

    def events(self):
        events = [self.finish] * min(4, len(self.flight))
        events += [self.arrive] * min(4, len(self.halves))
        events += [self.publish] if self.publishes else []
        events += [self.admit] if self.buffer.room() else []
        bound = self.buffer.batches.bound
        end = bound.phases.end(self.version)
        if not bound.synchronous and self.buffer.next_step >= end:
            limit = bound.phases.end(end)
        else:
            limit = end
        can_take = self.buffer.next_step < limit and self.buffer.ready(self.buffer.next_step)
        events += [self.take] if can_take else []
        events += [self.learn] if self.buffer.next_step >= end else []
        if not events:  # what was lost was noticed by nobody: its deadline passes
            assert self.buffer.in_flight(), store.waiting_for(self.buffer, self.version)
            events = [self.overdue]
        return events

    def admit(self):
        count = self.rng.randint(1, self.buffer.room())
        first = self.buffer.ledger.admitted
        prompts = [
            f"{self.tasks[i % len(self.tasks)]}/train/{i}" for i in range(first, first + count)
        ]
        ids = self.buffer.admit(prompts)
        assert len(ids) == count
        self.request(ids)

    def request(self, ids):
        for group, (prompt, missing) in self.buffer.in_flight(ids).items():
            self.flight += [(group, prompt, index, self.served) for index in missing]

    def overdue(self):
        self.request(None)

    def finish(self):
        if self.rng.random() < self.death:
            # half of what an actor held is lost, the other half arrives twice
            ids = {f[0] for f in self.flight[::2]}
            self.flight = self.flight[1::2]
            return self.request(ids)
        group, prompt, index, start = self.flight.pop(self.rng.randrange(len(self.flight)))
        content = random.Random(f"{group}:{index}")
        record, score = sample(
            group,
            index,
            status="error" if content.random() < self.bad_scores else "ok",
            reward=float(content.randrange(self.reward_levels)),
            prompt_id=prompt,
            version=[start, self.served],
            draw_id=f"bf16-0:{next(self.draws)}",
        )
        halves = [
            lambda: self.buffer.add_records([record]),
            lambda: self.buffer.add_scores([score]),
        ]
        if self.rng.random() < self.lost_half:
            halves.pop(self.rng.randrange(2))
        self.halves += halves

    def arrive(self):
        self.halves.pop(self.rng.randrange(len(self.halves)))()

    def take(self):
        step = self.buffer.next_step
        batch = self.buffer.take(step)
        groups = groups_of(self.buffer, step, batch)
        assert [(g.group_id, g.tokens) for g in groups] == batch.groups
        self.taken.append((ids_of(batch), groups))
        if self.rng.random() < 0.1:
            self.buffer.rollback(self.version)
            self.take_again()

    def take_again(self):
        """What was put back is taken as it was."""
        again = [ids_of(self.buffer.take(self.version + i)) for i in range(len(self.taken))]
        assert again == [ids for ids, _ in self.taken]

    def learn(self):
        ids, groups = self.taken.pop(0)
        ages = [
            self.version - int(v)
            for g in groups
            for e in g.episodes
            for t in e.parts
            for v in t.token_version
        ]
        assert min(ages) >= 0 and max(ages) <= self.buffer.batches.bound.cap, ages
        self.staleness.append(max(ages))
        self.batches.append(ids)
        self.buffer.commit(self.version)
        self.version += 1
        if self.version % self.buffer.batches.bound.steps_per_publish == 0:
            self.publishes.append([self.rng.randint(0, self.lag), self.version])
        self.buffer.set_versions(self.served, self.version)

    def publish(self):
        if self.publishes[0][0] > 0:
            self.publishes[0][0] -= 1
            return
        self.served = self.publishes.pop(0)[1]
        self.buffer.set_versions(self.served, self.version)
