"""`rlcore plan` as a user calls it."""

import json
import re

import pytest
from structure import ROOT

from rlcore.cli import main
from rlcore.planner.specs import Rates

QUICK = ["plan", "experiment=quickstart", "run_dir=unused"]
SMALL = [*QUICK, "schedule.groups_per_step=8"]


def test_a_fleet_is_forecast_from_given_rates_for_several_sizes(tmp_path, capsys):
    rates, out = tmp_path / "rates.json", tmp_path / "plan.json"
    given = {
        "actor": {"decode_s": 0.01, "max_running": 8, "load_s": 0.01},
        "learner": {"step_s": 0.05, "token_s": 0.0, "publish_s": 0.01},
        "lengths": {"prompt": 8, "median": 8},
    }
    rates.write_text(json.dumps(given))
    assert main([*SMALL, f"rates={rates}", "actors=1,2", f"out={out}"]) == 0
    one, two = json.loads(out.read_text())
    # 64 answers of about 8 tokens, 8 at a time: the actors are what limits
    assert one["bottleneck"] == "actors" and one["actors"] == {"bf16": 1}
    assert two["step_s"] < 0.7 * one["step_s"]
    assert capsys.readouterr().out.count("bf16") == 2


@pytest.mark.parametrize("words, sentence", [
    ([], "either rates=FILE or gpu=NAME"),
    (["gpu=h900"], "gpu=h900 is not accepted"),
    (["gpu=h100"], "shape= is missing"),
    (["gpu=h100", "shape=qwen9"], "shape=qwen9 is not accepted"),
    (["gpu=l40s", "shape=qwen3-32b"], "gpu=l40s is too small"),
    (["gpu=h100", "shape=qwen3-8b", "actors=1,x"], "actors=1,x is no list of numbers"),
    (["gpu=h100", "shape=qwen3-8b", "median_tokens=-1"], "median_tokens=-1 is no positive"),
    (["rates=/nowhere"], "rates=/nowhere cannot be read"),
    (["gpu=h100", "task=[digits,arithmetic]"], "task=[digits,arithmetic] cannot be planned"),
    (["gpu=h100", "task=higher_lower", "environment=higher_lower"], "environment= cannot be"),
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


def test_the_rates_of_the_page_on_planning_are_a_whole_file():
    text = (ROOT / "docs" / "planning.md").read_text()
    [block] = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    rates = Rates.model_validate_json(block)
    assert set(json.loads(block)["actor"]) == set(type(rates.actor).model_fields)
    assert set(json.loads(block)["learner"]) == set(type(rates.learner).model_fields)
    assert set(json.loads(block)) == set(Rates.model_fields)
