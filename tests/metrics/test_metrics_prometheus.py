"""The endpoint for a Prometheus server, scraped over HTTP."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from run_rows import recorded

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation
from rlcore.errors import UserError
from rlcore.loop.specs import ScheduleSpec
from rlcore.metrics.health import Health
from rlcore.metrics.logger import (
    MetricsLogger,
    RunHealth,
    RunReporter,
    open_logger,
    require_free_endpoint,
)
from rlcore.metrics.prometheus import PrometheusSink, exported_name, require_free
from rlcore.metrics.rules.base import Course
from rlcore.metrics.specs import LoggingSpec, WarningsSpec

HOST = "127.0.0.1"


def scrape(port):
    """(samples by name and labels, families by name) of a scrape."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    return samples, {f.name: f for f in families}


@pytest.fixture
def sink(tmp_path):
    one = PrometheusSink(tmp_path, 9, host=HOST, port=0)
    yield one
    one.close()


def test_rows_become_gauges_and_sums_counters(sink, tmp_path):
    for step, mean in ((1, 0.25), (2, 0.5)):
        row = {"step": step, "reward/mean": mean, "time/step_s": 1.5, "grad_norm": None}
        sink.log({**row, "eval/digits/mean@4": 0.75})
    samples, families = scrape(sink.port)
    assert samples[("rlcore_reward_mean",)] == 0.5
    assert samples[("rlcore_time_step_s_total",)] == 3.0
    assert samples[("rlcore_eval_digits_mean_4",)] == 0.75
    assert samples[("rlcore_planned_steps",)] == 9 and samples[("rlcore_step",)] == 2
    assert samples[("rlcore_run", str(tmp_path))] == 1
    assert ("rlcore_grad_norm",) not in samples  # it was not finite: nothing is made of it
    assert families["rlcore_reward_mean"].type == "gauge"
    assert families["rlcore_time_step_s"].type == "counter"
    assert "before selection (reward)" in families["rlcore_reward_mean"].documentation


def test_a_kind_of_actors_is_a_label(sink):
    sink.log({"step": 1, "mismatch/ess": 0.75, "mismatch/ess@fp8": 0.5, "mismatch/ess@bf16": 1.0})
    samples, families = scrape(sink.port)
    found = {key[1]: v for key, v in samples.items() if key[0] == "rlcore_mismatch_ess"}
    assert found == {"": 0.75, "fp8": 0.5, "bf16": 1.0}
    assert len(families["rlcore_mismatch_ess"].samples) == 3


def test_an_alarm_is_a_gauge_that_a_server_can_watch(sink, tmp_path):
    """The recorded asynchronous run that lost its policy: 0 before its fourth step, 1 from it."""
    health = RunHealth(tmp_path, Health(WarningsSpec(), Course(staleness_bound=8)))
    seen = {}
    with MetricsLogger([sink], health=health) as logger:
        for row in recorded()["async"][:6]:
            logger.log(row)
            seen[row["step"]] = scrape(sink.port)[0][("rlcore_health_alarm",)]
    assert [seen[step] >= 1 for step in (1, 2, 3, 4)] == [False, False, False, True]


def test_every_exported_name_is_one_that_prometheus_accepts():
    assert exported_name("ledger/failed/lost_3_times") == "rlcore_ledger_failed_lost_3_times"
    assert exported_name("eval/a-b/pass@8") == "rlcore_eval_a_b_pass_8"


def test_a_run_is_scraped_while_it_goes_on(tmp_path):
    seen = {}

    async def look(simulation):
        await simulation.until(20)
        simulation.actors["bf16-1"].hang()
        await simulation.until(45)
        seen["hung"] = scrape(sink.port)[0]

    sink = PrometheusSink(tmp_path, 60, host=HOST, port=0)
    with MetricsLogger([sink]) as logger:

        async def main():
            schedule = ScheduleSpec(steps=60, groups_per_step=4, max_staleness=1)
            scenario = Scenario(schedule, actors=3)
            simulation = Simulation(scenario, tmp_path, beside=RunReporter(logger))
            return await simulation.run(look)

        run_simulated(main())
        ended = scrape(sink.port)[0]
    hung = seen["hung"]
    assert 45 <= hung[("rlcore_step",)] <= 60 == ended[("rlcore_step",)]
    assert hung[("rlcore_actor_in_rotation", "bf16-1")] == 0
    assert hung[("rlcore_actor_in_rotation", "bf16-0")] == 1
    assert hung[("rlcore_actor_up", "bf16-1")] == 1  # silent, and not yet given up
    assert hung[("rlcore_notes_total",)] >= 1
    assert ended[("rlcore_ledger_consumed",)] == 240
    assert ended[("rlcore_time_step_s_total",)] > 60


def test_a_port_in_use_is_refused_in_a_sentence_and_leaves_nothing_open(tmp_path):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = LoggingSpec(console="off", wandb="disabled", prometheus_port=port)
        with pytest.raises(UserError, match=rf"logging\.prometheus_port={port}.*in use.*0 for no"):
            open_logger(tmp_path, spec, config={}, total_steps=1)
        with pytest.raises(UserError, match="in use"):
            require_free(HOST, port)
    require_free(HOST, port)
    require_free_endpoint(LoggingSpec(prometheus_host="no.such.host"))  # no endpoint
    with pytest.raises(UserError, match=r"prometheus_host=no\.such\.host"):
        PrometheusSink(tmp_path, 1, host="no.such.host", port=0)


def test_there_is_no_endpoint_unless_a_port_is_given(tmp_path):
    assert LoggingSpec().prometheus_port == 0 and LoggingSpec().prometheus_host == HOST
    spec = LoggingSpec(console="off", wandb="disabled")
    with open_logger(tmp_path, spec, config={}, total_steps=1) as logger:
        assert not [s for s in logger.sinks if isinstance(s, PrometheusSink)]


def test_closing_frees_the_port(tmp_path):
    first = PrometheusSink(tmp_path, 1, host=HOST, port=0)
    port = first.port
    first.close()
    first.close()
    PrometheusSink(tmp_path, 1, host=HOST, port=port).close()
