"""The real controller on fakes, in simulated time: schedules, faults and resumes end to end."""

import asyncio
from types import SimpleNamespace

import pytest

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.errors import DeadlineExceeded, RoleLost, StageError, UserError
from rlcore.loop.controller import ShownSamples
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec, SupervisionSpec

SCHEDULES = {
    "on_policy": {},
    "large_batch": {"steps_per_publish": 4},
    "cut_short": {"steps_per_publish": 5},
    "eta_1": {"max_staleness": 1, "on_publish": "in_flight"},
    "eta_3": {"max_staleness": 3, "steps_per_publish": 2, "on_publish": "abort"},
}


def schedule(name, **changes):
    return ScheduleSpec(**{"steps": 8, "groups_per_step": 4, **SCHEDULES[name], **changes})


def stop_after(step):
    async def stop(simulation):
        await simulation.until(step - 1)
        simulation.controller.request_stop()

    return stop


def audit(simulation, *, first_step=1):
    """What holds of every run: whole rows in order, every group trained on at most once and within
    the staleness bound, an account that balances."""
    spec, rows = simulation.scenario.schedule, simulation.reporter.rows
    assert [row["step"] for row in rows] == list(range(first_step, simulation.progress.step + 1))
    trained = [g for step in simulation.learner.trained.values() for g in {g for g, _ in step}]
    assert len(trained) == len(set(trained)) == spec.groups_per_step * simulation.progress.step
    assert sorted(simulation.learner.trained) == list(range(simulation.progress.step))
    bound = spec.steps_per_publish - 1 + spec.max_staleness
    assert all(row["staleness/max"] <= bound for row in rows)
    ledger = {k.removeprefix("ledger/"): v for k, v in rows[-1].items() if k.startswith("ledger/")}
    left = sum(ledger[k] for k in ("consumed", "evicted", "failed", "live"))
    assert ledger["admitted"] == left and ledger["consumed"] == len(trained)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_without_faults(name, tmp_path):
    simulation = simulate(Scenario(schedule(name)), tmp_path)
    audit(simulation)
    assert simulation.progress.published == simulation.progress.step == 8
    assert simulation.reporter.notes == [] and len(simulation.reporter.shown) >= 8 // 5


def test_generation_goes_on_beside_the_learner_when_asynchronous(tmp_path):
    def seconds(name):
        simulation = simulate(Scenario(schedule(name, steps=20), learn_s=2.0), tmp_path / name)
        return simulation.progress.seconds

    assert seconds("eta_1") < 0.75 * seconds("on_policy")


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_actor_that_dies_costs_no_sample(name, tmp_path):
    async def kill(simulation):
        await simulation.until(2)
        await asyncio.sleep(0.5)
        simulation.actors["bf16-0"].die()

    simulation = simulate(Scenario(schedule(name)), tmp_path, kill)
    audit(simulation)
    assert any("bf16-0 is replaced: its process died" in n for n in simulation.reporter.notes)
    assert simulation.fleet.supervisor.replacements == 1


def test_the_last_actor_may_die_too(tmp_path):
    async def kill(simulation):
        await simulation.until(2)
        for actor in list(simulation.actors.values()):
            actor.die()

    simulation = simulate(Scenario(schedule("eta_1", steps=12)), tmp_path, kill)
    audit(simulation)
    assert len(simulation.started) == 4


def test_an_actor_that_hangs_is_replaced_after_its_deadline(tmp_path):
    async def hang(simulation):
        await simulation.until(2)
        simulation.actors["bf16-1"].hang()

    scenario = Scenario(
        schedule("eta_1", steps=40), supervision=SupervisionSpec(hang_timeout_s=20), learn_s=2.0
    )
    simulation = simulate(scenario, tmp_path, hang)
    audit(simulation)
    assert any("cluster.hang_timeout_s=20" in n for n in simulation.reporter.notes)


def test_a_replacement_that_does_not_start_is_replaced_and_too_many_end_the_run(tmp_path):
    async def kill(simulation):
        await simulation.until(2)
        simulation.not_starting = ["no GPU is left"] * 9
        simulation.actors["bf16-0"].die()

    scenario = Scenario(schedule("eta_1", steps=500), supervision=SupervisionSpec(max_restarts=3))
    with pytest.raises(StageError, match=r"failed 4 times.*max_restarts=3.*no GPU is left"):
        simulate(scenario, tmp_path, kill)


@pytest.mark.parametrize("name", ["on_policy", "eta_1"])
def test_a_restart_of_the_graders_loses_no_sample(name, tmp_path):
    async def restart(simulation):
        for step in (1, 3, 5):
            await simulation.until(step)
            await asyncio.sleep(0.9)
            simulation.scorer.restart()

    scenario = Scenario(schedule(name), evaluation=EvaluationSpec(every=3, prompts=4))
    simulation = simulate(scenario, tmp_path, restart)
    audit(simulation)
    restarted = [n for n in simulation.reporter.notes if "graders' process died" in n]
    assert len(restarted) == 3


def test_a_lost_role_ends_the_attempt(tmp_path):
    async def lose(simulation):
        await simulation.until(2)
        simulation.watch.lost = "learner rank 0"

    with pytest.raises(RoleLost, match="learner rank 0 died"):
        simulate(Scenario(schedule("on_policy", steps=100)), tmp_path, lose)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("at", [3, 4])
def test_a_stopped_run_goes_on_where_it_was(name, at, tmp_path):
    first = simulate(Scenario(schedule(name)), tmp_path / "run", stop_after(at))
    assert first.progress.step == at
    second = simulate(Scenario(schedule(name)), tmp_path / "run", resume=True)
    audit(second, first_step=at + 1)
    if schedule(name).synchronous:  # to the sample, as if it had never been stopped
        whole = simulate(Scenario(schedule(name)), tmp_path / "whole")
        assert second.learner.trained == whole.learner.trained


def test_a_lost_learner_costs_the_steps_since_the_checkpoint(tmp_path):
    async def fail(simulation):
        await asyncio.sleep(0)
        simulation.learner.fails_at[5] = RoleLost("learner rank 0 died")

    scenario = Scenario(schedule("eta_1"), checkpoint=CheckpointSpec(every=2))
    with pytest.raises(RoleLost):
        simulate(scenario, tmp_path, fail)
    again = simulate(scenario, tmp_path, resume=True)
    audit(again, first_step=5)
    assert any("groups were in flight at the checkpoint" in n for n in again.reporter.notes)


def test_a_plan_made_longer_later_continues_exactly(tmp_path):
    simulate(Scenario(schedule("large_batch", steps=6)), tmp_path / "run")
    longer = simulate(Scenario(schedule("large_batch", steps=12)), tmp_path / "run", resume=True)
    whole = simulate(Scenario(schedule("large_batch", steps=12)), tmp_path / "whole")
    assert longer.learner.trained == whole.learner.trained


def test_a_resume_in_the_middle_of_a_phase_begins_it_again(tmp_path):
    simulate(Scenario(schedule("large_batch")), tmp_path, stop_after(5))
    resumed = simulate(Scenario(schedule("large_batch")), tmp_path, resume=True)
    assert resumed.learner.resumed_phases == [str(tmp_path / "step_000005" / "learner")]
    assert resumed.learner.published[0] == 4  # the weights that the phase began with


def test_a_stop_before_a_resumed_phase_began_again_leaves_the_checkpoint_resumed_from(tmp_path):
    """Until then the learner's weights are those of the phase's start: saved with step 5 they would
    be wrong."""

    async def stop_at_once(simulation):
        simulation.controller.request_stop()

    simulate(Scenario(schedule("large_batch")), tmp_path, stop_after(5))
    before = (tmp_path / "step_000005" / "MANIFEST.json").stat().st_mtime_ns
    resumed = simulate(Scenario(schedule("large_batch")), tmp_path, stop_at_once, resume=True)
    assert resumed.progress.step == 5 and resumed.learner.resumed_phases == []
    assert (tmp_path / "step_000005" / "MANIFEST.json").stat().st_mtime_ns == before


def test_a_stop_in_the_middle_of_a_synchronous_phase_publishes_nothing(tmp_path):
    simulation = simulate(Scenario(schedule("large_batch")), tmp_path, stop_after(5))
    assert simulation.learner.published == [0, 4] and simulation.progress.step == 5


def test_the_fleet_grows_and_shrinks_while_the_run_goes_on(tmp_path):
    async def scale(simulation):
        await simulation.until(2)
        simulation.wanted = {"bf16": 4}
        await simulation.until(12)
        assert len(simulation.fleet.rotation()) == 4
        simulation.wanted = {"bf16": 1}
        await simulation.until(16)
        assert [m.name for m in simulation.fleet.members] == ["bf16-0"]
        simulation.wanted = {"bf16": 0}

    simulation = simulate(Scenario(schedule("eta_1", steps=30)), tmp_path, scale)
    audit(simulation)
    assert any("rlcore scale was refused" in n for n in simulation.reporter.notes)


def test_an_engine_that_refuses_a_request_ends_the_run_with_its_sentence(tmp_path):
    class Refusing(Exception):
        pass

    def tokens(request):
        raise UserError("rollout.logprobs_k=99 is more than the engine was built for.")

    with pytest.raises(UserError, match=r"rollout\.logprobs_k=99"):
        simulate(Scenario(schedule("on_policy"), tokens=tokens), tmp_path)


def test_a_learner_without_data_ends_the_run_and_says_what_is_missing(tmp_path):
    scenario = Scenario(
        schedule("on_policy", wait_data_timeout_s=50),
        speed=Speed(step_s=100),
        request_timeout_s=1e5,
    )
    with pytest.raises(DeadlineExceeded, match=r"waited 50 s.*wait_data_timeout_s.*4 in flight"):
        simulate(scenario, tmp_path)


def test_a_prompt_that_no_actor_survives_is_given_up_and_replaced(tmp_path):
    """Group 5 ends every actor that samples it."""
    simulations = []

    def tokens(request):
        if request.group_id == 5:
            holder = next(m for m in simulations[0].fleet.members if request.group_id in m.groups)
            asyncio.get_running_loop().call_later(0.3, holder.process.client.die)
        return 10

    async def begin(simulation):
        simulations.append(simulation)

    scenario = Scenario(schedule("eta_1", steps=20), tokens=tokens, actors=3)
    simulation = simulate(scenario, tmp_path, begin)
    audit(simulation)
    assert simulation.reporter.rows[-1]["ledger/failed/lost_3_times"] == 1
    assert any("given up (5 (digits/train/5))" in n for n in simulation.reporter.notes)


def test_failed_scores_are_noted_with_their_reason_at_each_tenfold_number(tmp_path):
    def reward(answer):
        return None if answer.sample_index == 0 else 1.0

    simulation = simulate(Scenario(schedule("eta_1", steps=12), samples=4, reward=reward), tmp_path)
    noted = [n for n in simulation.reporter.notes if "could not be scored" in n]
    assert len(noted) == 2 and all("the grader raised" in n for n in noted)
    audit(simulation)


def test_the_time_of_a_publication_is_counted_once(tmp_path):
    simulation = simulate(Scenario(schedule("on_policy")), tmp_path)
    for row in simulation.reporter.rows:
        assert 0.59 < row["time/publish_s"] < 0.8  # 0.1 gathering, 0.5 loading
        assert row["time/publish_stop_s"] == pytest.approx(0.5)
        assert row["publish/sent_mib"] == 2.0 and row["publish/changed_share"] == 0.5
        parts = row["time/wait_data_s"] + row["time/learn_s"] + row["time/publish_s"]
        assert parts == pytest.approx(row["time/step_s"], rel=0.05) or row["step"] == 8


def test_what_a_group_was_sent_is_counted_once(tmp_path):
    simulation = simulate(Scenario(schedule("on_policy"), joined=True), tmp_path)
    for row in simulation.reporter.rows:
        assert row["publish/sent_mib"] == 2.0 and row["publish/changed_share"] == 0.5


def test_the_first_row_after_a_resume_counts_only_its_own_tokens(tmp_path):
    simulate(Scenario(schedule("on_policy")), tmp_path, stop_after(3))
    resumed = simulate(Scenario(schedule("on_policy")), tmp_path, resume=True)
    row = resumed.reporter.rows[0]
    tokens = row["throughput/rollout_tokens_per_s"] * row["time/step_s"]
    assert tokens == pytest.approx(4 * 2 * 10)


def test_a_row_says_how_long_engines_were_busy(tmp_path):
    scenario = Scenario(
        schedule("eta_1", steps=30), supervision=SupervisionSpec(heartbeat_s=0.5), learn_s=0.2
    )
    rows = simulate(scenario, tmp_path).reporter.rows
    busy, elapsed = (sum(r[k] for r in rows) for k in ("time/rollout_s", "time/step_s"))
    assert 0.3 * elapsed < busy <= elapsed


def test_evaluations_go_on_beside_training_and_mark_the_best_checkpoint(tmp_path):
    scenario = Scenario(
        schedule("eta_1"),
        evaluation=EvaluationSpec(every=2, prompts=4),
        checkpoint=CheckpointSpec(every=2, keep=1, keep_best="eval/digits/greedy"),
        reward=lambda answer: float("eval/4" in answer.purpose),
    )
    simulation = simulate(scenario, tmp_path)
    evaluated = [
        r["eval/policy_version"] for r in simulation.reporter.rows if "eval/digits/greedy" in r
    ]
    assert len(evaluated) == 5 and sorted(evaluated) == evaluated
    assert (0, "digits/greedy") in simulation.reporter.evaluations
    scores = simulation.progress.scores["eval/digits/greedy"]
    assert scores["4"] == 1.0 and scores["6"] == 0.0
    assert {p.name for p in tmp_path.glob("step_*")} == {"step_000004", "step_000008"}
    audit(simulation)


def test_training_does_not_wait_for_a_slow_disk(tmp_path):
    async def slow(simulation):
        await asyncio.sleep(0)
        simulation.learner.write_s = 30.0

    scenario = Scenario(schedule("eta_1", steps=40), checkpoint=CheckpointSpec(every=2))
    simulation = simulate(scenario, tmp_path, slow)
    audit(simulation)
    assert max(row["time/step_s"] for row in simulation.reporter.rows) < 10
    assert any("is left out: the one before is still" in n for n in simulation.reporter.notes)
    assert (tmp_path / "step_000040").is_dir()


def test_a_disk_slower_than_its_deadline_costs_a_checkpoint_and_not_the_run(tmp_path):
    async def slow(simulation):
        await asyncio.sleep(0)
        simulation.learner.write_s = 100.0
        await simulation.until(30)
        simulation.learner.write_s = 0.0

    spec = CheckpointSpec(every=5, write_timeout_s=20)
    simulation = simulate(Scenario(schedule("eta_1", steps=60), checkpoint=spec), tmp_path, slow)
    audit(simulation)
    assert any("could not be written (waited 20 s" in n for n in simulation.reporter.notes)
    assert any("the checkpoint is written again" in n for n in simulation.reporter.notes)


def test_samples_for_readers_that_do_not_come_are_noted_and_cost_no_step():
    class Late:
        async def samples(self, step, count):
            raise DeadlineExceeded("waited 20 s for readable samples.")

    notes: list[str] = []
    clients = SimpleNamespace(scorer=Late(), learner=None)
    shown = ShownSamples(clients, SimpleNamespace(note=notes.append), 4)
    asyncio.run(shown.fetch(6))
    asyncio.run(shown.complete())
    assert notes == ["no samples of step 7 are shown: waited 20 s for readable samples."]
