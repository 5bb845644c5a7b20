"""`rlcore plan` as a user calls it."""

import json
import re

import pytest
from structure import ROOT

from rlcore.advisor.plan import work_beside
from rlcore.advisor.planner.specs import Rates
from rlcore.cli import main
from rlcore.config.compose import load

QUICK = ["plan", "experiment=quickstart", "run_dir=unused"]
SMALL = [*QUICK, "schedule.groups_per_step=8"]


def test_a_fleet_is_forecast_from_given_rates_for_several_sizes(tmp_path, capsys):
    rates, out, drawn = (tmp_path / name for name in ("rates.json", "plan.json", "plan.svg"))
    given = {
        "actor": {"decode_s": 0.01, "max_running": 8, "load_s": 0.01},
        "learner": {"step_s": 0.05, "token_s": 0.0, "publish_s": 0.01},
        "lengths": {"prompt": 8, "median": 8},
    }
    rates.write_text(json.dumps(given))
    words = [f"rates={rates}", "actors=1,2", f"out={out}", f"picture={drawn}"]
    assert main([*SMALL, *words]) == 0
    one, two = json.loads(out.read_text())
    # 64 answers of about 8 tokens, 8 at a time: the actors are what limits
    assert one["bottleneck"] == "actors" and one["actors"] == {"bf16": 1}
    assert two["step_s"] < 0.7 * one["step_s"]
    shown = capsys.readouterr().out
    assert shown.count("bf16") == 2
    assert "samples are up to 1 step old; steps are shortened or held" in shown
    assert drawn.read_text().count("<polyline") == 2  # sampled, and trained on


def test_a_run_is_simulated_for_longer_than_it_samples_ahead(tmp_path):
    rates, out = tmp_path / "rates.json", tmp_path / "plan.json"
    rates.write_text(json.dumps({"learner": {"step_s": 5.0, "token_s": 0.0, "publish_s": 0.01}}))
    words = [f"rates={rates}", f"out={out}", "schedule=async", "schedule.max_staleness=32"]
    assert main([*SMALL, *words]) == 0
    [found] = json.loads(out.read_text())
    assert found["bottleneck"] == "learner" and found["staleness_mean"] > 16
    assert found["rollout_tokens_per_s"] == pytest.approx(found["train_tokens_per_s"], rel=0.05)


def test_a_slow_grader_is_that_of_a_node(tmp_path):
    rates, out = tmp_path / "rates.json", tmp_path / "plan.json"
    learner = {"step_s": 0.01, "token_s": 0.0, "publish_s": 0.01}
    rates.write_text(json.dumps({"learner": learner, "grade_s": 5.0}))
    words = [f"rates={rates}", "actor.bf16.count=4", f"out={out}"]
    assert main([*SMALL, *words]) == 0
    [one] = json.loads(out.read_text())
    assert main([*SMALL, *words, "cluster.launch.gpus_per_node=2"]) == 0
    [two] = json.loads(out.read_text())
    assert one["bottleneck"] == two["bottleneck"] == "graders"
    assert two["step_s"] == pytest.approx(one["step_s"] / 2, rel=0.1)


TOOLS = ["plan", "experiment=tools_quickstart", "run_dir=unused", "schedule.steps=8"]


def test_an_environment_is_planned_by_rates_of_its_turns(tmp_path, capsys):
    rates, out = tmp_path / "rates.json", tmp_path / "plan.json"
    given = {
        "actor": {"decode_s": 1e-4, "load_s": 0.01},
        "learner": {"step_s": 0.05, "token_s": 0.0, "publish_s": 0.01},
        "lengths": {"prompt": 8, "median": 6, "spread": 0.0},
    }
    rates.write_text(json.dumps(given))
    words = [*TOOLS, f"rates={rates}", f"out={out}", "environment.concurrency=16"]
    assert main(words) == 2
    assert "has no episodes, whose turns environment= needs" in capsys.readouterr().err
    rates.write_text(json.dumps({**given, "episodes": {"turns": 2, "given": 4, "call_s": 0.1}}))
    assert main(words) == 0
    [found] = json.loads(out.read_text())
    # 128 episodes of 16 groups, 16 at once, four calls each
    assert found["step_s"] == pytest.approx(8 * 4 * 0.1, rel=0.1) and found["graders_idle"] > 0.99
    assert main([*words, "turns=2"]) == 2
    assert "turns=2 is for gpu=NAME" in capsys.readouterr().err
    assert main([*QUICK, f"rates={rates}"]) == 2
    assert "has episodes, and the run has no environment" in capsys.readouterr().err


@pytest.mark.parametrize("words, sentence", [
    ([*QUICK, "turns=2"], "turns= is of an environment's episodes, and the run has none"),
    ([*TOOLS, "turns=9"], "turns=9 is not accepted: episodes have 1 to environment.max_turns=3"),
    ([*TOOLS, "call_s=-1"], "call_s=-1 is not a positive number"),
])  # fmt: skip
def test_words_of_episodes_are_checked(words, sentence, capsys):
    assert main([*words, "gpu=h100", "shape=qwen3-1.7b"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_gpu_s_forecast_of_an_environment_takes_its_turns_from_the_words(tmp_path):
    found = []
    for turns in (1, 3):
        out = tmp_path / f"{turns}.json"
        words = [f"turns={turns}", "prompt_tokens=8", "given_tokens=4", "call_s=0.5", f"out={out}"]
        assert main([*TOOLS, "schedule=on_policy", "gpu=h100", "shape=qwen3-1.7b", *words]) == 0
        found += json.loads(out.read_text())
    one, three = (f["step_s"] for f in found)
    assert three - one > 2 * 0.5  # two more calls, and two more turns


@pytest.mark.parametrize("words, sentence", [
    ([], "either rates=FILE or gpu=NAME"),
    (["gpu=h900"], "gpu=h900 is not accepted"),
    (["gpu=h100"], "shape= is missing"),
    (["gpu=h100", "shape=qwen9"], "shape=qwen9 is not accepted"),
    (["gpu=l40s", "shape=qwen3-32b"], "gpu=l40s is too small"),
    (["gpu=h100", "shape=qwen3-8b", "picture=a.svg"], "picture=a.svg needs actors=1,2,4"),
    (["gpu=h100", "shape=qwen3-8b", "actors=1,x"], "actors=1,x is not a list of numbers"),
    (["gpu=h100", "shape=qwen3-8b", "median_tokens=-1"], "median_tokens=-1 is not a positive"),
    (["rates=/nowhere"], "rates=/nowhere cannot be read"),
    (["rates=/nowhere", "shape=qwen3-8b"], "shape=qwen3-8b is for gpu=NAME"),
    (["rates=/nowhere", "median_tokens=9"], "median_tokens=9 is for gpu=NAME"),
    (["gpu=h100", "task=[digits,arithmetic]"], "task=[digits,arithmetic] cannot be planned"),
    (["gpu=h100", "actor.bf16.rounding=int3", "learner.round_as=bf16"], "round_as=bf16 cannot be"),
    (["gpu=h100", "bitwise=true", "schedule=on_policy"], "bitwise=true cannot be planned"),
    (
        ["gpu=h100", "shape=qwen3-8b", "teacher=engine", "teacher.path=here"],
        "teacher.engine.num_gpus=0 scores on CPUs",
    ),
    (["gpu=h100", "shape=qwen3-8b", "gpus=8", "teacher=policy"], "teacher=policy takes memory"),
    (["gpu=h100", "actor.bf16.speculate={path: x}"], "actor.bf16.speculate cannot be planned"),
    (["gpu=h100", "actor.bf16.kv_on_update=keep"], "actor.bf16.kv_on_update=keep cannot be"),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert main([*QUICK, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_wrong_rates_name_file_and_key(tmp_path, capsys):
    rates = tmp_path / "rates.json"
    rates.write_text('{"actor": {"decode_s": -1}}')
    assert main([*QUICK, f"rates={rates}"]) == 2
    assert "actor.decode_s is wrong" in capsys.readouterr().err


def test_rates_hold_for_runs_with_the_critic_and_the_teacher_of_the_measured_run(tmp_path, capsys):
    rates = tmp_path / "rates.json"
    rates.write_text('{"beside": "teacher=policy"}')
    assert main([*QUICK, f"rates={rates}"]) == 2
    assert "is of a run with teacher=policy, and this one has none" in capsys.readouterr().err
    rates.write_text("{}")
    assert main([*QUICK, f"rates={rates}", "algorithm=ppo", "critic=model"]) == 2
    assert "no critic and no teacher, and this one has critic=model" in capsys.readouterr().err


def test_critics_and_teachers_are_counted_in_the_learner(monkeypatch):
    """In FLOPs a token, of a policy of one FLOP a parameter: each step, before each phase."""

    def counted(*words):
        config = load(["run_dir=/tmp/x", *words])
        found = work_beside(config, 1.0)
        return found.trained, found.step_flops, found.phase_flops

    assert counted() == (0, 0, 0)
    assert counted("algorithm=ppo", "critic=model") == (1, 6, 2)
    assert counted("algorithm=ppo", "critic=value_head") == (0, 2, 2)
    assert counted("teacher=policy") == (0, 0, 4)
    monkeypatch.setattr("rlcore.config.parts.teacher_facts.folder_parameters", lambda path: 5.0)
    assert counted("teacher=frozen", "teacher.path=here") == (0, 0, 10)
    assert counted("teacher=frozen", "teacher.path=here", "teacher.top_k=null") == (0, 10, 0)
    assert counted("teacher=engine", "teacher.path=here") == (0, 0, 0)


def test_the_rates_of_the_page_on_planning_are_a_whole_file():
    text = (ROOT / "docs" / "planning.md").read_text()
    block, episodes = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    rates = Rates.model_validate_json(block)
    read = Rates.model_validate_json(episodes).episodes
    assert read is not None and read.model_dump() == json.loads(episodes)["episodes"]
    assert set(json.loads(block)["actor"]) == set(type(rates.actor).model_fields)
    assert set(json.loads(block)["learner"]) == set(type(rates.learner).model_fields)
    assert set(json.loads(block)) == set(Rates.model_fields)


MIXED = ["plan", "experiment=mixed_fleet", "run_dir=unused", "schedule.groups_per_step=4"]
H100 = ["gpu=h100", "shape=qwen3-1.7b", "prompt_tokens=8", "median_tokens=8"]


@pytest.fixture
def kinds(tmp_path):
    """Files as `rlcore doctor json=true` prints them, one of each kind alone."""
    rates = {
        "bf16": {"tokens": 100.0, "effective": 1.0, "below": 0.01, "length": 20.0},
        "fp8": {"tokens": 300.0, "effective": 0.8, "below": 0.21, "length": 20.0},
    }
    files = [tmp_path / f"{label}.json" for label in rates]
    for file, (label, rate) in zip(files, rates.items()):
        file.write_text(json.dumps({"run": {"rates": {"actor_s": {label: rate}}}}))
    return ",".join(map(str, files))


def test_a_mix_is_advised_from_measured_kinds(tmp_path, kinds, capsys):
    file = tmp_path / "rates.json"
    file.write_text("{}")
    assert main([*MIXED, f"rates={file}", f"kinds={kinds}"]) == 0
    said = capsys.readouterr().out
    # with a twentieth below: 0.01 (1 - x) + 0.21 x; (0.8 + 0.2 * 0.8) / (0.8/100 + 0.2/300)
    assert f"as measured in {kinds}" in said
    assert "actor.bf16.share=0.80 actor.fp8.share=0.20, 111 tokens an actor-second" in said
    assert main([*MIXED, f"rates={file}"]) == 0
    assert "mix: none, since the tail of each kind is unknown" in capsys.readouterr().out


def test_a_forecast_gives_the_pace_of_kinds_and_a_run_their_tails(kinds, capsys):
    prices = ["actor.bf16.price=2", "actor.fp8.price=1"]
    assert main([*MIXED, *H100, f"kinds={kinds}", *prices]) == 0
    said = capsys.readouterr().out
    assert "at the pace forecast for h100, with tails measured in" in said
    paces = {
        k: float(v.replace(",", ""))
        for k, v in re.findall(r"^  (bf16|fp8) +(\S+) tokens an", said, re.M)
    }
    assert paces["fp8"] > paces["bf16"] > 1000.0  # half of the bytes of weights to read
    assert said.count("actor.bf16.share=0.80 actor.fp8.share=0.20") == 2  # the tail decides
    assert "tokens a unit of money" in said


def test_a_source_of_kinds_that_is_none_is_refused(tmp_path, kinds, capsys):
    one, _ = kinds.split(",")
    empty = tmp_path / "empty.json"
    empty.write_text('{"run": null}')
    for given, sentence in (
        (one, "measured no tokens of fp8"),
        (f"{kinds},{empty}", "empty.json is neither a run directory nor a file"),
    ):
        assert main([*MIXED, *H100, f"kinds={given}"]) == 2
        assert sentence in capsys.readouterr().err
    assert main([*QUICK, *H100, f"kinds={kinds}"]) == 2
    assert "is one kind" in capsys.readouterr().err


GPUS = ["gpu=h100", "shape=qwen3-1.7b", "gpus=3", "prompt_tokens=8", "median_tokens=8"]


def test_gpus_are_divided_compared_and_drawn(tmp_path, capsys):
    out, drawn = tmp_path / "split.json", tmp_path / "split.svg"
    words = ["variants=sparse:16", "failures=1", f"out={out}", f"picture={drawn}"]
    assert main([*SMALL, "rollout.samples_per_prompt=2", *GPUS, *words]) == 0
    found = json.loads(out.read_text())
    assert {s["variant"] for s in found["splits"]} == {"as configured", "sparse:16"}
    assert all(s["ranks"] + s["actors"] == 3 for s in found["splits"])
    assert found["failures"][0]["failures_per_day"] == 1.0
    assert drawn.read_text().count("<polyline") == 2
    text = capsys.readouterr().out
    assert text.count("best") >= 3 and "1.00 times" in text and "lost" in text


@pytest.mark.parametrize("words, sentence", [
    (["gpus=8"], "gpus=8 needs gpu=NAME"),
    (["gpu=h100", "shape=qwen3-8b", "gpus=8", "actors=1"], "gpus=8 needs gpu=NAME"),
    (["gpu=h100", "shape=qwen3-8b", "gpus=x"], "gpus=x is not accepted: give a whole number"),
    (["gpu=h100", "shape=qwen3-8b", "variants=fp8"], "variants=fp8 needs gpus=N"),
    (["gpu=h100", "shape=qwen3-8b", "gpus=8", "variants=int3"], "variants=int3 is not accepted"),
    (["gpu=h100", "shape=qwen3-8b", "gpus=8", "failures=-1"], "failures=-1 is not a list"),
    (["gpu=h100", "shape=qwen3-8b", "gpus=2"], "gpus=2 of gpu=h100 are too few"),
    (["gpu=h100", "shape=qwen3-8b", "gpus=8", "actor=[bf16,fp8]"], "needs one kind of actor"),
])  # fmt: skip
def test_mistakes_of_a_division_are_one_sentence(words, sentence, capsys):
    assert main([*QUICK, *words]) == 2
    assert sentence in capsys.readouterr().err
