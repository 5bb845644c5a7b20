"""A sequence classifier of random weights as a reward, in a process of its own."""

import os
import signal
import threading
import time

import psutil
import pytest
import torch
from timing import deadline
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rlcore.errors import StageError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.tasks.grading_process import WorkerProcess
from rlcore.tasks.rewards.classifier import ClassifierReward
from rlcore.tasks.rewards.protocols import RewardQuery
from rlcore.tasks.rewards.specs import ClassifierSpec

pytestmark = pytest.mark.processes
CHAT = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}={% endfor %}"


def folder(path, *, labels=1, pad=True, chat=True):
    torch.manual_seed(0)
    tokenizer = build_char_tokenizer("0123456789=?ua")
    tokenizer.chat_template = CHAT if chat else None
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=labels,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id if pad else None,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    return str(path), tokenizer


def expected(path, ids):
    """Logits of one sequence, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


class Judged:
    """A reward and the verdicts on what it is asked."""

    def __init__(self, **settings):
        self.reward = ClassifierReward("task.rewards.r.classifier", ClassifierSpec(**settings))
        self.verdicts = {}
        self.arrived = threading.Condition()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.reward.close()

    def tell(self, index, verdict):
        with self.arrived:
            self.verdicts[index] = verdict
            self.arrived.notify_all()

    def ask(self, pairs):
        self.verdicts = {}
        for i, (question, response) in enumerate(pairs):
            self.reward.submit(RewardQuery(question, "", response), lambda v, i=i: self.tell(i, v))
        return self.answers(len(pairs))

    def answers(self, count):
        until = time.monotonic() + deadline(60)
        with self.arrived:
            while len(self.verdicts) < count:
                self.reward.check()
                assert time.monotonic() < until, f"{len(self.verdicts)} of {count} verdicts"
                self.arrived.wait(0.5)
            return [self.verdicts[i] for i in range(count)]


def workers():
    children = psutil.Process().children(recursive=True)
    return {p for p in children if not ended(p) and "classifier_worker" in " ".join(p.cmdline())}


def worker():
    (found,) = workers()
    return found


def ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


PAIRS = [("12=", "3"), ("1=", "23"), ("123=", "45"), ("9?", "9")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One reward for the tests that need no settings of their own: a start takes seconds. Its
    folder and its tokenizer. Who ends its process leaves another."""
    path, tokenizer = folder(tmp_path_factory.mktemp("classifier"))
    with Judged(path=path, batch_size=3, timeout_s=deadline(5)) as judged:
        yield judged, path, tokenizer


def test_rewards_are_the_logits_of_the_conversations(shared):
    judged, path, tokenizer = shared
    are_the_logits(judged.ask(PAIRS), path, tokenizer)


def test_without_padding_rewards_are_alike_and_a_process_ends_with_its_reward(tmp_path):
    path, tokenizer = folder(tmp_path, pad=False)
    before = workers()
    with Judged(path=path, batch_size=3) as judged:
        are_the_logits(judged.ask(PAIRS), path, tokenizer)
        (process,) = workers() - before
    assert ended(process)


def are_the_logits(found, path, tokenizer):
    for (question, response), verdict in zip(PAIRS, found):
        ids = tokenizer(f"u{question}=a{response}=", add_special_tokens=False)["input_ids"]
        assert verdict.value == pytest.approx(float(expected(path, ids)[0]), abs=1e-5)
    assert len({round(v.value, 6) for v in found}) == len(PAIRS)


def test_of_several_labels_one_is_taken(tmp_path):
    path, tokenizer = folder(tmp_path, labels=3, chat=False)
    with Judged(path=path, label=2, output="probability") as judged:
        (verdict,) = judged.ask(PAIRS[:1])
    ids = tokenizer("12=", "3")["input_ids"]
    assert verdict.value == pytest.approx(float(expected(path, ids).softmax(-1)[2]), abs=1e-5)


def test_the_probability_of_one_label_is_a_sigmoid(tmp_path):
    path, tokenizer = folder(tmp_path, chat=False)
    with Judged(path=path, output="probability") as judged:
        (verdict,) = judged.ask(PAIRS[:1])
    ids = tokenizer("12=", "3")["input_ids"]
    assert verdict.value == pytest.approx(float(expected(path, ids).sigmoid()[0]), abs=1e-5)


def test_a_conversation_that_is_too_long_is_a_failed_score_and_not_cut(shared):
    long, short = shared[0].ask([("1=", "2" * 80), ("1=", "2")])
    assert long.status == "error" and "86 tokens is not judged" in long.error
    assert "takes 1 to 64" in long.error
    assert short.status == "ok"


def test_a_killed_process_is_replaced(shared):
    judged = shared[0]
    before = judged.ask(PAIRS)
    os.kill(worker().pid, signal.SIGKILL)
    assert [v.value for v in judged.ask(PAIRS)] == [v.value for v in before]


def test_a_stopped_process_is_killed_at_the_deadline(shared):
    judged = shared[0]
    judged.ask(PAIRS[:1])
    stopped = worker()
    stopped.suspend()
    (late,) = judged.ask(PAIRS[:1])
    assert (late.status, late.value) == ("timeout", None)
    assert f"passed its deadline of {deadline(5):g} s" in late.error
    assert ended(stopped)
    (good,) = judged.ask(PAIRS[:1])
    assert good.status == "ok"


def test_a_sample_that_processes_die_on_fails(shared, monkeypatch):
    judged = shared[0]
    monkeypatch.setattr("rlcore.tasks.rewards.classifier.MAX_DEATHS", 1)
    judged.ask(PAIRS[:1])
    process, receive = worker(), WorkerProcess.receive
    process.suspend()

    def kill_and_receive(asked, timeout_s):  # it has the sample by now
        monkeypatch.setattr(WorkerProcess, "receive", receive)
        process.kill()
        return receive(asked, timeout_s)

    monkeypatch.setattr(WorkerProcess, "receive", kill_and_receive)
    judged.verdicts = {}
    judged.reward.submit(RewardQuery("1=", "", "2"), lambda verdict: judged.tell(0, verdict))
    (verdict,) = judged.answers(1)
    assert verdict.status == "error" and "killed by SIGKILL" in verdict.error
    (good,) = judged.ask(PAIRS[:1])
    assert good.status == "ok"


def test_a_folder_without_a_classifier_ends_the_scoring(tmp_path):
    said = r"rewards\.r\.classifier: the classifier's process did not start"
    with Judged(path=str(tmp_path / "none")) as judged, pytest.raises(StageError, match=said):
        judged.ask(PAIRS[:1])


def test_a_label_that_the_model_has_not_ends_the_scoring(tmp_path):
    path, _ = folder(tmp_path, labels=2)
    said = "label=2 is not one of the model's 2 labels"
    with Judged(path=path, label=2) as judged, pytest.raises(StageError, match=said):
        judged.ask(PAIRS[:1])
