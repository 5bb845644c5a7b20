"""A whole run whose samples are made by a program in a process of its own, that calls the model
through the endpoint."""

import pytest
from conftest import rows

from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.models.text import load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.slow]

ALPHABET = "0123456789=+- "
TEMPLATE = (
    "{% for m in messages %}{{ '-' if m.role == 'assistant' else '+' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}-{% endif %}"
)
# `run` is what the run calls; `client` is another program, which knows the address alone.
AGENT = """
import pathlib
import subprocess
import sys

def run(item):
    client = pathlib.Path(__file__).with_name("client.py")
    done = subprocess.run(
        [sys.executable, str(client), item.question],
        capture_output=True, text=True, timeout=60, check=True,
    )
    said = done.stdout
    return said.count("1") / max(1, len(said)), {"letters": len(said)}
"""
CLIENT = """
import json
import os
import sys
from urllib.request import Request, urlopen

messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(2):
    asked = Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urlopen(asked, timeout=60) as answer:
        said = json.load(answer)["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "+1"}]
print("".join(m["content"] for m in messages if m["role"] == "assistant"), end="")
"""


@pytest.fixture
def model(tmp_path):
    shape = FreshModelSpec(
        hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate_size=128
    )
    folder = build_fresh_model(tmp_path / "model", ALPHABET, shape, seed=0, max_len=128)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_requests_of_a_program_outside_train_the_model(command, model, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "client.py").write_text(CLIENT)
    run_dir = tmp_path / "run"
    run = command(
        *("train", "model=path", f"model.path={model}", "model.max_len=128", "task=digits"),
        *("environment=endpoint", f"environment.args.program={tmp_path}/agent.py:run"),
        *("environment.concurrency=4", "rollout.max_new_tokens=16", "rollout.samples_per_prompt=4"),
        *("actor.bf16.kv_cache_gib=0.25", "schedule=on_policy", "schedule.steps=2"),
        *("schedule.groups_per_step=4", "learner.lr=1e-3", "learner.lr_warmup_steps=0"),
        *("evaluation.prompts=4", "evaluation.every=0", "evaluation.at_start=false"),
        *("correction=tis", "logging.wandb=disabled", "cluster.object_store_mib=128"),
        # figures of environments come with heartbeats, and a step takes a second
        *("cluster.heartbeat_s=0.2", f"run_dir={run_dir}"),
    )
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2]
    for row in found:
        # two calls an episode, all of them answered by the policy as it was
        assert row["reward_parts/turns"] == 2 and row["reward_parts/conversations"] == 1
        assert row["reward_parts/refused_calls"] == 0 and row["ledger/score_errors"] == 0
        assert row["mismatch/abs_dlogp_mean"] < 1e-4
        assert row["grad_norm"] > 0 and row["reward/mean"] > 0
        assert 0 < row["environment/call_s"] < 60 and row["environment/open"] <= 4
        faults = ("errors", "timeouts", "unreadable_turns")
        assert {row[f"environment/{name}"] for name in faults} == {0.0}
        assert row["environment/waiting"] <= 16
    assert found[-1]["ledger/consumed"] == 2 * 4 and found[-1]["policy_version"] == 2
