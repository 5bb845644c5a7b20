"""Proofs judged by a Lean server: a stand-in that speaks its protocol, in a process of its own. No
Lean is run."""

import json
import socket
import subprocess
import sys

import pytest
from test_rewards_requests import QUICK, ask
from timing import deadline, free_port, listens, wait_until

from rlcore.commands.preflight import ask_lean_servers
from rlcore.commands.try_task import try_task
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.tasks.rewards.protocols import RewardQuery
from rlcore.tasks.rewards.specs import RewardSpec
from rlcore.testing.lean_server import verify
from rlcore.testing.reward_server import HttpReply, RewardServer

TEXT = "theorem t (x : ℝ) (h : x = 2) : x + 1 = 3 :="
SOURCE = f"import Mathlib\n\n{TEXT} by\n"


def asked(proof, statement=TEXT):
    return RewardQuery("prove it", SOURCE, f"Here:\n```lean\n{statement} {proof}\n```")


def lean(url, **settings):
    return RewardSpec.model_validate(
        {"lean": {"url": url, **QUICK, "proof_timeout_s": 5, **settings}}
    )


def replies(body, number):
    return HttpReply(body=verify(body))


def test_a_batch_is_one_request_of_the_servers_form():
    samples = [
        asked("by\n  norm_num"),
        asked("by\n  rfl"),
        asked("by sorry"),
        asked("by simp", "x"),
    ]
    with RewardServer(replies) as server:
        verdicts = ask(lean(server.url, batch_size=4, batch_wait_s=deadline(5)), samples)
    (seen,) = server.seen
    assert seen.path == "/verify" and seen.body["timeout"] == 5
    sources = [code["proof"] for code in seen.body["codes"]]
    assert sources[0] == f"import Mathlib\n\n{TEXT} by\n  norm_num\n\n#print axioms t\n"
    assert len(sources) == 3  # the sorry is not asked about; `x := by simp` states nothing: tactics
    assert [v.value for v in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert verdicts[2].parts == {"checked": 0.0, "refused": 1.0, "late": 0.0}


@pytest.mark.parametrize(
    ("messages", "value"),
    [
        ([("info", "'t' depends on axioms: [propext, Quot.sound]")], 1.0),
        ([("info", "'t' does not depend on any axioms"), ("warning", "unused variable")], 1.0),
        ([("info", "'t' depends on axioms: [propext, Lean.ofReduceBool]")], 0.0),
        ([("info", "'t' depends on axioms: [sorryAx]")], 0.0),
        ([("info", "'t' depends on axioms: [cheat]")], 0.0),
        ([("error", "unsolved goals"), ("info", "'t' does not depend on any axioms")], 0.0),
        ([("warning", "'t' does not depend on any axioms")], 0.0),
        ([], 0.0),
    ],
)
def test_a_proof_rests_on_the_usual_axioms_and_has_no_error(messages, value):
    said = [{"severity": severity, "data": data} for severity, data in messages]
    body = {"results": [{"custom_id": "0", "response": {"messages": said}}]}
    with RewardServer(lambda *_: HttpReply(body=body)) as server:
        (verdict,) = ask(lean(server.url), [asked("by norm_num")])
    assert (verdict.status, verdict.value) == ("ok", value)


def test_leans_time_limit_is_a_wrong_proof_and_a_fault_of_the_server_is_no_verdict():
    samples = [asked(f"by {word}\n  norm_num") for word in ("hang", "crash", "slow_import", "x")]
    with RewardServer(replies) as server:
        late, crash, slow, right = ask(lean(server.url), samples)
    assert (late.status, late.value, late.parts["late"]) == ("ok", 0.0, 1.0)
    assert (crash.status, crash.value) == ("error", None) and "terminated" in crash.error
    assert (slow.status, slow.value) == ("timeout", None)
    assert right.value == 1.0


@pytest.mark.parametrize(
    "body",
    [
        {"detail": "busy"},
        {"results": []},
        {"results": [{"custom_id": "7", "response": {"messages": []}}]},
        {"results": [{"custom_id": "0", "response": {"message": "Unknown environment."}}]},
        {"results": [{"custom_id": "0"}]},
    ],
)
def test_a_reply_of_another_form_gives_no_reward(body):
    with RewardServer(lambda *_: HttpReply(body=body)) as server:
        (verdict,) = ask(lean(server.url), [asked("by norm_num")])
    assert (verdict.status, verdict.value) == ("error", None)


def test_a_busy_server_is_asked_again_and_one_that_is_gone_gives_no_reward():
    def busy(body, number):
        return (
            HttpReply(429, {"detail": "No available REPLs"})
            if number < 2
            else replies(body, number)
        )

    with RewardServer(busy) as server:
        (verdict,) = ask(lean(server.url, retries=2), [asked("by norm_num")])
        url = server.url
    assert verdict.value == 1.0
    (gone,) = ask(lean(url), [asked("by norm_num")])
    assert (gone.status, gone.value) == ("error", None)


@pytest.fixture
def stand_in():
    """A stand-in in a process of its own; its address."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "rlcore.testing.lean_server", str(port)])
    wait_until(lambda: listens(port), 60, "the stand-in to start")
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def words(tmp_path):
    row = {"name": "t", "formal_statement": f"{TEXT} by\n", "proof": "  norm_num"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    paths = [f"task.args.{split}_path={tmp_path}/rows.jsonl" for split in ("train", "heldout")]
    return ["run_dir=runs/x", "task=lean", "task.args.worked_field=proof", *paths]


@pytest.mark.processes
def test_a_task_is_tried_against_a_server(stand_in, words, capsys):
    config = load([*words, f"task.rewards.proof.lean.url={stand_in}"])
    assert try_task(config, 1) == 0
    shown = capsys.readouterr().out
    assert "theorem t" in shown and "reward 1" in shown


def test_a_server_that_does_not_answer_is_named_before_a_run_starts(words):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        config = load([*words, f"task.rewards.proof.lean.url=http://127.0.0.1:{port}"])
        said = rf"task\.rewards\.proof\.lean\.url=http://127\.0\.0\.1:{port} does not answer"
        with pytest.raises(UserError, match=said):
            ask_lean_servers(config)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["task.grade_weight=1"], r"task\.name=lean has no own grader"),
        (["task.rewards.proof.lean.proof_timeout_s=300"], r"proof_timeout_s=300 is not below"),
        (["task=digits", "task.rewards.p.lean.url=http://h"], r"task\.name=digits has none"),
        (["environment=attempts"], "grades its episodes itself"),
    ],
)
def test_what_does_not_go_together_is_refused(words, extra, said):
    url = [] if "task=digits" in extra else ["task.rewards.proof.lean.url=http://h:1"]
    base = ["run_dir=runs/x"] if "task=digits" in extra else words
    with pytest.raises(UserError, match=said):
        load([*base, *url, *extra])
