"""Rows and versions of the loop, with stand-ins for every process."""

import asyncio
from types import SimpleNamespace

import pytest

from rlcore.runtime.controller import Clocks, Controller
from rlcore.runtime.fleet import Member
from rlcore.runtime.plan import Plan, Progress
from rlcore.runtime.publisher import Publisher

PLAN = {
    **{"steps": 9, "groups_per_step": 2, "steps_per_publish": 3, "max_staleness": 0, "eval_every": 0},
    **{"checkpoint_every": 0, "checkpoint_at_end": True, "wait_data_timeout_s": 5, "publish_timeout_s": 5},
    **{"step_timeout_s": 5, "heartbeat_s": 1, "hang_timeout_s": 5, "request_timeout_s": 5, "samples_per_step": 0},
    **{"wire_dtype": "float32", "verify_full": False, "run_seed": 0},
}
GATHER_S, DELIVER_S = 0.1, 0.2


class Buffer:
    """Answers with what was set."""

    arrived = 0.0

    async def call(self, method, *args, what):
        return {"buffer/arrived_tokens": self.arrived} if method == "metrics" else None

    async def in_flight(self):
        return {}


class Learners:
    async def publish(self, version, *args, **kw):
        await asyncio.sleep(GATHER_S)
        return SimpleNamespace(manifest=SimpleNamespace(version=version))

    async def train_step(self, step):
        return {"train/tokens": 10.0}


class Evaluator:
    awaited = None

    def wants(self, step, last_step):
        return False

    async def collect(self, *, wait):
        return {}


class Saver:
    """Counts the checkpoints that are asked for."""

    begun = 0

    async def begin(self, controller):
        self.begun += 1

    async def done(self, *, last=False):
        pass

    async def poll(self):
        pass


def controller(progress=None, resumed_from=None, **plan):
    rows = []

    async def deliver(publication):
        await asyncio.sleep(DELIVER_S)
        return {"receive_s": DELIVER_S}

    fleet = SimpleNamespace(publish=deliver, replacements=0, members=[])
    made = Controller(
        Plan(**(PLAN | plan)),
        fleet=fleet,
        buffer=None,
        scorer=None,
        learners=[],
        prompts=None,
        requests=None,
        evaluator=Evaluator(),
        reporter=SimpleNamespace(row=rows.append, note=lambda text: None),
        saver=Saver(),
        progress=progress,
        resumed_from=resumed_from,
    )
    made.buffer = made.feed._buffer = Buffer()
    made.learners = Learners()
    made.publisher = Publisher(made.plan, made.learners, fleet, made.buffer, made.progress)
    return made, rows


def test_the_time_of_a_publication_is_counted_once():
    async def scenario():
        made, rows = controller(steps_per_publish=1)
        await made._start()
        await made._one_step(0, {}, Clocks())
        await made._one_step(1, {}, Clocks())
        for row in rows:
            assert GATHER_S + DELIVER_S <= row["time/publish_s"] < GATHER_S + 2 * DELIVER_S
            assert row["time/publish_s"] <= row["time/step_s"]
            assert row["time/publish_receive_s"] == DELIVER_S

    asyncio.run(scenario())


def test_the_first_row_after_a_resume_counts_only_its_own_tokens():
    async def scenario():
        made, rows = controller(Progress(step=3, published=3))
        made.buffer.arrived = 1e6
        await made._start()
        made.buffer.arrived += 50
        await made._one_step(3, {}, Clocks())
        assert rows[0]["throughput/rollout_tokens_per_s"] == pytest.approx(50 / rows[0]["time/step_s"])

    asyncio.run(scenario())


def test_a_stop_in_the_middle_of_a_synchronous_phase_publishes_nothing():
    async def scenario():
        made, _ = controller()
        await made._start()
        made.request_stop()
        await made._one_step(0, {}, Clocks())
        assert made.progress.step == 1 and made.progress.published == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("step", "written"), [(4, 0), (3, 1)])
def test_a_stop_before_a_resumed_phase_began_anew_leaves_the_checkpoint_resumed_from(step, written):
    """Its weights are the phase's first until then: saved with step 4 they would be wrong."""

    async def scenario():
        made, _ = controller(Progress(step=step, published=3, phase_version=3), resumed_from="learner")
        made.request_stop()
        await made._learn()
        assert made._saver.begun == written

    asyncio.run(scenario())


def test_a_row_has_the_seconds_that_engines_were_busy_since_the_row_before():
    def member(name, status, **kw):
        return Member(name, "bf16", None, None, status=status, **kw)

    async def scenario():
        made, rows = controller()
        first, second = member("bf16-0", {"pid": 1, "busy_s": 4.0}), member("bf16-1", {})
        other = member("evaluation-0", {"pid": 3, "busy_s": 50.0}, purpose="evaluation")
        made.fleet.members = [first, second, other, member("bf16-2", {}, well=False)]
        await made._start()
        first.status, second.status = {"pid": 1, "busy_s": 7.0}, {"pid": 2, "busy_s": 1.0}
        await made._one_step(0, {}, Clocks())
        first.status = {"pid": 9, "busy_s": 0.5}  # a new process under the old name
        await made._one_step(1, {}, Clocks())
        assert [row["time/rollout_s"] for row in rows] == [2.0, 0.25]

    asyncio.run(scenario())
