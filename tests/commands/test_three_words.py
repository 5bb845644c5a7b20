"""`rlcore train model=M data=D reward=R`: what three words stand for, and what is chosen."""

import json
import subprocess
import sys

import pytest
from timing import deadline

import rlcore
from rlcore import cli
from rlcore.api_inputs import Inputs, as_words
from rlcore.commands.choices import Facts, choices, completed, with_length
from rlcore.commands.memory import stored_bytes
from rlcore.commands.start_checks import check
from rlcore.commands.trial import Tried
from rlcore.config.compose import load
from rlcore.config.groups import three_words
from rlcore.errors import UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.sizes import folder_parameters
from rlcore.models.specs import FreshModelSpec
from rlcore.models.text import load_tokenizer
from rlcore.tasks import make_task

SMALL = FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=32)
WORDS = ("model=model", "data=rows.jsonl", "reward=graders.py:grade")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "graders.py").write_text(
        "def grade(item, response):\n    return len(response) % 2\n"
    )
    build_fresh_model(tmp_path / "model", "0123456789+=", SMALL, seed=0, max_len=512)


def tried(**changed):
    facts = {
        "lengths": tuple(range(1, 33)),
        "limit": 192,
        "asked": 192,
        "cut": 0.0,
        "with_signal": 5,
    }
    return Tried(**{**facts, "groups": 8, "mean": 0.25, **changed})


def facts(**changed):
    plain = {"parameters": 135_000_000, "gpus": 0, "cpus": 2, "rows": 100, "has_heldout": False}
    return Facts(**{**plain, "prompt": 90, "tried": tried(), **changed})


def chosen(*, gpus=0, **changed):
    return dict(
        word.split("=", 1)
        for choice in choices(facts(gpus=gpus, **changed))
        for word in choice.words
    )


def test_three_words_are_a_model_rows_and_a_reward():
    own = {"data": "rows.jsonl", "reward": "graders.py:grade"}
    assert three_words(["model=model", "seed=1"], own, None) == [
        "model=path",
        "model.path=model",
        "task=file",
        "task.args.grader=graders.py:grade",
        "task.args.train_path=rows.jsonl",
        "seed=1",
    ]
    assert three_words(["model=tiny", "seed=1"], {}, None) is None
    shipped = three_words(["model=OWNER/NAME"], {"data": "d.jsonl", "reward": "gsm8k"}, None)
    assert "task=gsm8k" in shipped and "model.path=OWNER/NAME" in shipped


def test_other_commands_take_the_words_too_and_eval_reads_the_rows_as_held_out(tmp_path):
    model = f"model={tmp_path / 'model'}"
    named = ("model=path", f"model.path={tmp_path / 'model'}")
    for verb in ("chat", "plan", "sft", "sweep"):
        assert cli.read([verb, model, "run_dir=r"]).settings == (*named, "run_dir=r")
    words = cli.read(["eval", model, "data=rows.jsonl", "reward=gsm8k"]).settings
    assert words == (*named, "task=gsm8k", "task.args.heldout_path=rows.jsonl")


def test_a_reward_that_is_neither_is_refused():
    with pytest.raises(UserError, match=r"reward=grade is not accepted: give FILE.py:FUNCTION"):
        three_words([], {"data": "rows.jsonl", "reward": "grade"}, None)


@pytest.mark.parametrize(
    ("parameters", "gpus", "rate"),
    [
        (135e6, 0, 1e-4),
        (3e9, 0, 5e-5),
        (2e10, 0, 1e-5),
        (1e7, 0, 1e-6),
        (8e9, 1, 1e-6),
        (8e9, 4, 1e-6),
    ],
)
def test_rates_are_those_of_pretrained_models(parameters, gpus, rate):
    found = chosen(parameters=int(parameters), gpus=gpus)
    assert float(found["learner.lr"]) == rate
    assert (found["learner"] == "lora") == (not gpus and parameters > 5e7)


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("parameters", [10**7, 135 * 10**6])
def test_what_is_chosen_is_accepted_by_the_checks_of_a_run(gpus, parameters):
    words = [f"{k}={v}" for k, v in chosen(gpus=gpus, parameters=parameters).items()]
    base = three_words(["model=model"], {"data": "rows.jsonl", "reward": "graders.py:grade"}, None)
    config = load([*words, *base, "run_dir=r"])
    assert (
        config.actor["bf16"].count + config.learner.num_gpus
        <= max(gpus, 1) + config.schedule.colocated
    )
    assert config.schedule.colocated == (gpus == 1)
    assert (config.learner.num_gpus > 0) == (gpus > 0) == (config.actor["bf16"].num_gpus > 0)


def test_lengths_follow_the_trial_answers():
    assert chosen()["rollout.max_new_tokens"] == "64"  # 1.25 x 32, in 32s
    assert chosen()["model.max_len"] == "192"
    cut = chosen(tried=tried(cut=0.5))
    assert cut["rollout.max_new_tokens"] == "192"
    slow = tried(cut=1.0, limit=16)
    assert chosen(tried=slow)["rollout.max_new_tokens"] == "192"
    assert any("not known" in choice.reason for choice in choices(facts(tried=slow)))
    assert chosen(tried=None)["rollout.max_new_tokens"] == "192"
    lines = " ".join(choice.reason for choice in choices(facts(tried=tried(with_signal=0))))
    assert "NONE LEARNS" in lines and "0 of 8 groups with signal" in lines


def test_lengths_leave_room_for_prompts_and_stay_within_what_the_model_holds():
    own = chosen(answer=512, tried=None)
    assert own["rollout.max_new_tokens"] == "512" and own["model.max_len"] == "640"  # 602, in 64s
    short = chosen(room=128, tried=tried(cut=1.0))
    assert (short["rollout.max_new_tokens"], short["model.max_len"]) == ("38", "128")


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        (["rollout.max_new_tokens=450"], (450, 512)),
        (["model.max_len=40"], (35, 40)),  # "99+1=" is five tokens
        (["rollout.max_new_tokens=6000", "model.max_len=7000"], None),  # the model has 512
        (["learner.micro_batch_tokens=300", "evaluation.max_new_tokens=9"], (192, 256)),
        ([], (192, 256)),
    ],
)
def test_lengths_of_the_user_are_followed_by_the_other_one(words, lengths):
    given = cli.read(["train", *WORDS, *words, "dry_run=true", "run_dir=r"])
    if lengths is None:
        with pytest.raises(UserError, match="beyond the 512 positions"):
            check(cli.config_of(given))
        return
    config = cli.config_of(given)
    assert (config.rollout.max_new_tokens, config.model.max_len) == lengths


@pytest.mark.parametrize(("rows", "few"), [(60, True), (799, True), (800, False), (None, False)])
def test_a_share_of_few_rows_is_said_to_be_too_small(rows, few):
    reasons = " ".join(choice.reason for choice in choices(facts(rows=rows)))
    assert ("SHOW NO GAIN" in reasons) == few
    assert chosen(rows=rows)["task.args.heldout_share"] == "0.02"


def test_the_object_store_holds_two_publications():
    found = chosen(parameters=1_700_000_000)
    assert int(found["cluster.object_store_mib"]) * 2**20 > 2 * 1_700_000_000 * 4


def test_ten_lines_say_what_was_chosen_and_a_word_of_the_user_goes_before(capsys):
    words = ["train", *WORDS, "learner.lr=3e-5", "schedule.steps=2", "dry_run=true", "run_dir=r"]
    config = cli.config_of(cli.read(words))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 11 and all(": " in line for line in lines)
    assert config.learner.lr == 3e-5 and config.schedule.steps == 2
    assert config.task.args["heldout_share"] == 0.02
    assert "learner.lr=" not in "\n".join(lines)
    tokenizer = load_tokenizer("model")
    assert config.cluster.object_store_mib * 2**20 >= 2 * stored_bytes(config, tokenizer)
    assert folder_parameters("model") < 5e7


def test_a_group_of_the_user_is_left_whole():
    base = three_words(["model=model"], {"data": "rows.jsonl", "reward": "graders.py:grade"}, None)
    words, _ = completed([*base, "learner=lora"], ["learner=lora"], None, "r", trial=False)
    assert load(words, run_dir="r").learner.lr == 1e-3  # that of configs/learner/lora.yaml


@pytest.mark.processes
def test_trial_answers_are_sampled_and_graded_before_a_run(capsys):
    words = ["train", *WORDS, "run_dir=r"]
    config = cli.config_of(cli.read(words))
    out = capsys.readouterr().out
    assert "32 trial answers" in out and "of 8 groups with signal" in out
    # a fresh model ends hardly an answer
    assert 32 <= config.rollout.max_new_tokens <= 192


@pytest.mark.processes
def test_an_evaluation_of_a_model_has_the_length_of_its_trial_answers(monkeypatch):
    words = ["model=path", "model.path=model", "model.max_len=128", "task=file", "run_dir=r"]
    rows = ["task.args.heldout_path=rows.jsonl", "task.args.grader=graders.py:grade"]
    config, line = with_length(load([*words, *rows]), [*words, *rows], lambda: None)
    assert 32 <= config.rollout.max_new_tokens <= 128 - 4  # "9+1=" and more are four tokens
    assert "is chosen: 32 trial answers" in line
    monkeypatch.setattr("rlcore.commands.choices.try_answers", None)  # not called again
    given = [*words, *rows, "rollout.max_new_tokens=7"]
    assert with_length(load(given), given, lambda: None) == (load(given), "")


def test_a_held_out_share_keeps_questions_apart():
    rows = [{"question": f"{n % 60}+1=", "answer": str(n % 60 + 1)} for n in range(100)]
    with open("twice.jsonl", "w") as out:
        out.writelines(f"{json.dumps(row)}\n" for row in rows)
    args = {"train_path": "twice.jsonl", "grader": "graders.py:grade", "heldout_share": 0.1}
    task = make_task("file", args)
    asked = {
        split: {task.item(split, i).question for i in range(task.size(split))}
        for split in ("train", "heldout")
    }
    assert len(asked["heldout"]) == 6 and not asked["train"] & asked["heldout"]
    assert task.size("train") + task.size("heldout") == 100
    again = make_task("file", args)
    assert again.item("heldout", 0).question == task.item("heldout", 0).question


@pytest.mark.parametrize(
    ("share", "said"), [(1.5, "between 0 and 1"), (0.999, "leaves no question")]
)
def test_a_share_that_leaves_nothing_is_refused(share, said):
    args = {"train_path": "rows.jsonl", "grader": "graders.py:grade", "heldout_share": share}
    with pytest.raises(UserError, match=said):
        make_task("file", args)


BOUND = 4


def below(text):
    return len(text) < BOUND


def short(item, response):
    return float(below(response))


def test_a_function_of_a_notebook_takes_what_it_uses_along(tmp_path):
    import linecache

    text = "import math as m\nK = 2\n\ndef half(x):\n    return m.floor(x / K)\n\n"
    text += "def score(item, response):\n    return float(half(len(response)))\n"
    space = {"__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), space)
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(True), "<cell 1>")
    (word,) = Inputs(None, None, space["score"]).words(tmp_path / "run")
    task = make_task("file", {"train_path": "rows.jsonl", "grader": word.partition("=")[2]})
    assert task.grade(task.item("train", 0), "12345").reward == 2.0


@pytest.mark.parametrize("reward", [lambda item, response: 1.0, short.__call__])
def test_a_callable_without_a_source_of_its_own_is_refused(reward, tmp_path):
    with pytest.raises(UserError, match="cannot be sent to the graders: give a function"):
        Inputs(None, None, reward).words(tmp_path / "run")


def test_rows_callables_and_settings_of_python_become_words(tmp_path):
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "2+1=", "answer": "3"}]
    words = Inputs("model", rows, short).words(tmp_path / "run")
    files = dict(word.split("=", 1) for word in words)
    task = make_task("file", {"train_path": files["data"], "grader": files["reward"]})
    item = task.item("train", 1)
    assert (item.question, item.answer) == ("2+1=", "3")
    assert task.grade(item, "123").reward == 1.0 and task.grade(item, "12345").reward == 0.0
    assert as_words({"learner": {"lr": 1e-4, "lora": {}}, "seed": 3, "task": "file"}) == [
        "learner.lr=0.0001",
        "learner.lora={}",
        "seed=3",
        "task=file",
    ]


@pytest.mark.parametrize("data", [[], ["a"], {"a": 1}])
def test_data_that_is_no_rows_is_refused(data, tmp_path):
    with pytest.raises(UserError, match="data= is not accepted"):
        Inputs(None, data, None).words(tmp_path / "run")


SCRIPT = """
import rlcore

BOUND = 4


def few(text):
    return len(text) % BOUND


def score(item, response):
    return few(response) / BOUND + float(response.startswith(item.answer))


class Seen(rlcore.Callback):
    steps = []

    def on_step(self, step, metrics):
        self.steps.append(step)


if __name__ == "__main__":
    run = rlcore.train(
        model="model",
        data=[{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(100)],
        reward=score,
        run_dir="run",
        callbacks=[Seen()],
        overrides={"schedule": {"steps": 2}, "evaluation.prompts": 4, "logging.wandb": "disabled"},
    )
    assert [row["step"] for row in run.rows] == Seen.steps == [1, 2], run.rows
    assert run.rows[0]["ledger/score_errors"] == 0 and run.rows[0]["reward/std"] > 0
    assert "eval/file/sampled_reward" in run.evaluation, run.evaluation
    assert run.config["task"]["args"]["heldout_share"] == 0.02
    assert {sample["reference"] for sample in run.samples} <= {str(n) for n in range(101)}
    assert "<svg" in run._repr_html_()
"""


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_rows_and_a_function_of_a_program_train_a_model(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = [sys.executable, "mine.py"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=deadline(600)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "32 trial answers" in done.stdout and "Too few steps to judge" in done.stdout


def test_a_run_before_its_first_step_is_shown_by_its_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("{}\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no step yet" in rlcore.load_run(tmp_path)._repr_html_()
