"""A whole run whose episodes have several turns, with an environment that fails now and then and an
actor that is killed."""

import contextlib
import json

import psutil
import pytest
from conftest import rows
from timing import deadline

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

GAME = """
import time
from rlcore.environments.games import HigherLower

class Moody(HigherLower):
    def reset(self, item, seed):
        self.index = int(item.prompt_id.split("/")[-1])
        self.tame = "/heldout/" in item.prompt_id
        return super().reset(item, seed)

    def step(self, action):
        if not self.tame:
            if self.index % 10 == 3 and self._random.random() < 0.3:
                raise RuntimeError("it is in no mood")
            if self.index == 5:
                time.sleep(1000)
            time.sleep(0.02)
        return super().step(action)

    def worked(self):
        self.tame = True  # for the warm-up
        return super().worked()
"""


def processes(run, name):
    """Those of a run whose command line has the name; environments come and go meanwhile."""
    found = []
    for process in run.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie
            found += [process] if name in " ".join(process.cmdline()) else []
    return found


def test_a_run_goes_on_past_failing_environments_and_a_killed_actor(command, small, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    run_dir = tmp_path / "run"
    own = [w for w in small if not w.startswith(("experiment=", "task.args"))]
    run = command(
        "train",
        "experiment=agent_quickstart",
        *own,
        f"environment={tmp_path}/game.py:Moody",
        "environment.args={guesses: 3}",
        f"environment.step_timeout_s={deadline(2):g}",
        f"run_dir={run_dir}",
        "schedule.steps=12",
        "cluster.heartbeat_s=1",
    )
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    victims = processes(run, "RolloutActor")
    assert len(victims) == 1
    servers = processes(run, "environments.server")
    assert servers
    victims[0].kill()
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, 13))
    last = found[-1]
    assert last["rollout/replacements"] == 1
    # of a group whose every episode hangs nothing is left to train on, of some others too little
    assert last["ledger/consumed"] == 12 * 8
    assert 1 <= last["ledger/failed"] == last["ledger/failed/too_few_samples"] <= 12
    assert last["ledger/admitted"] == last["ledger/consumed"] + last["ledger/failed"]
    assert last["ledger/score_timeouts"] == 4 and last["ledger/score_errors"] > 0
    assert (
        "eval/higher_lower/greedy" in last and last["eval/higher_lower/greedy_failed_scores"] == 0
    )
    assert 1 <= last["reward_parts/turns"] <= 3 and last["staleness/max"] <= 1
    # sampled by engine and learner alike, over all turns
    assert found[0]["mismatch/abs_dlogp_mean"] < 1e-4
    assert not [p for p in servers if p.is_running() and p.status() != "zombie"]
    shown = [json.loads(line) for f in (run_dir / "samples").iterdir() for line in f.open()]
    assert any(set(s["response"]) & set("<>") for s in shown if "response" in s)


# Waits in the second turn until the file says go, and leaves a mark of every episode that does.
WAITING = """
import os
import pathlib
import time
from rlcore.environments.games import HigherLower

HERE = pathlib.Path(__file__).parent

class Waiting(HigherLower):
    def reset(self, item, seed):
        self.trains = "/heldout/" not in item.prompt_id
        return super().reset(item, seed)

    def step(self, action):
        if self.trains and self._count == 1 and (HERE / "wait").exists():
            (HERE / f"mark-{os.getpid()}").touch()
            while (HERE / "wait").exists():
                time.sleep(0.05)
        return super().step(action)
"""


def stopped_in_turn_two(command, small, folder, *words):
    """A run of which every open training episode waits in its second turn, after two steps."""
    (folder / "game.py").write_text(WAITING)
    own = [w for w in small if not w.startswith(("experiment=", "task.args"))]
    run = command(
        *("train", "experiment=agent_quickstart", *own, f"run_dir={folder}/run"),
        f"environment={folder}/game.py:Waiting",
        *("environment.step_timeout_s=400", "cluster.heartbeat_s=1", "evaluation.every=1000"),
        *("evaluation.at_start=false", "checkpoint.every=1", *words),
    )
    run.wait_for(lambda: len(rows(folder / "run")) >= 2, what="two steps")
    (folder / "wait").touch()
    run.wait_for(lambda: len(list(folder.glob("mark-*"))) >= 4, what="episodes in turn two")
    return run


def trained_on(run_dir):
    """(step, prompt) of every sample that was shown of a batch; each prompt is one group's."""
    return [
        (
            int(file.stem.removeprefix("step_")),
            int(json.loads(line)["prompt_id"].rpartition("/")[2]),
        )
        for file in sorted((run_dir / "samples").glob("step_*.jsonl"))
        for line in file.open()
    ]


@pytest.mark.slow
def test_an_actor_killed_in_turn_two_of_three_costs_no_group(command, small, tmp_path):
    run = stopped_in_turn_two(command, small, tmp_path, "schedule.steps=8")
    (victim,) = processes(run, "RolloutActor")
    victim.kill()
    run.wait_for(lambda: not victim.is_running() or victim.status() == "zombie", what="its end")
    (tmp_path / "wait").unlink()
    assert run.wait() == 0, run.text[-3000:]
    last = rows(tmp_path / "run")[-1]
    assert last["step"] == 8 and last["rollout/replacements"] == 1
    assert last["ledger/consumed"] == 8 * 8 == last["ledger/admitted"]
    assert last["ledger/failed"] == last.get("ledger/evicted", 0) == 0
    assert last["ledger/score_errors"] == last["ledger/score_timeouts"] == 0


@pytest.mark.slow
def test_everything_killed_in_the_middle_of_episodes_loses_and_repeats_none(
    command, small, tmp_path
):
    words = ("schedule.steps=8", "logging.samples_per_step=100", "schedule.max_staleness=1")
    run = stopped_in_turn_two(command, small, tmp_path, *words)
    run.kill()
    run.wait()
    (tmp_path / "wait").unlink()
    again = command("train", f"run_dir={tmp_path}/run", "resume=auto")
    assert again.wait() == 0, again.text[-3000:]
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found] == list(range(1, 9))
    last = found[-1]
    assert last["ledger/consumed"] == 8 * 8 and last["staleness/max"] <= 1
    assert last["ledger/failed"] == last.get("ledger/evicted", 0) == 0
    steps_of = {}
    for step, prompt in trained_on(tmp_path / "run"):
        steps_of.setdefault(prompt, set()).add(step)
    assert sorted(steps_of) == list(range(8 * 8))
    assert all(len(steps) == 1 for steps in steps_of.values())


@pytest.mark.slow
def test_a_sparse_actor_plays_what_a_learner_of_its_rule_scores(command, small, tmp_path):
    own = [w for w in small if not w.startswith(("experiment=", "task.args"))]
    run = command(
        *("train", "experiment=agent_quickstart", *own, f"run_dir={tmp_path}/run"),
        *("actor=sparse", "actor.sparse.sparse={block_size: 16, blocks: 2, share: null}"),
        *("actor.sparse.kv_cache_gib=0.25", "learner.train_sparse=true", "schedule=on_policy"),
        # episodes of more pages than two
        *("task.args.digits=6", "environment.args.guesses=8", "rollout.max_new_tokens=8"),
        # a model of 60 warm-up steps writes few numbers of six digits
        "environment.args.forgiving=true",
        *("schedule.steps=2", "schedule.groups_per_step=8"),
    )
    assert run.wait() == 0, run.text[-3000:]
    for row in rows(tmp_path / "run"):
        assert row["reward_parts/turns"] > 6 and row["response_length/mean"] > 36
        assert row["mismatch/abs_dlogp_mean"] < 1e-4
