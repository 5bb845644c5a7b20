"""A whole run whose episodes have several turns, with an environment that fails now and then and an
actor that is killed."""

import contextlib
import json

import psutil
import pytest
from conftest import rows

pytestmark = pytest.mark.cluster

GAME = """
import time
from rlcore.environments.higher_lower import HigherLower

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
        "environment.step_timeout_s=2",
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
