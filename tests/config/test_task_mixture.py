"""Several tasks: how they are composed, what holds for them, what is refused."""

from itertools import product

import pytest
import yaml

from rlcore.config.compose import load, to_yaml
from rlcore.errors import UserError


def run(*words, config_dir=None):
    return load(["run_dir=runs/x", *words], config_dir)


def test_a_list_keys_its_tasks_by_label_and_one_task_stays_as_it_was():
    config = run("task=[digits,arithmetic]", "task.digits.weight=3", "task.arithmetic.args.ops='*'")
    assert list(config.tasks) == ["digits", "arithmetic"] and config.mixed
    assert [t.weight for t in config.tasks.values()] == [3.0, 1.0]
    assert config.tasks["arithmetic"].args == {"ops": "*"}
    assert config.tasks["digits"].args == {"min_digits": 4, "max_digits": 8}
    single = run("task=arithmetic", "task.args.ops='*'")
    assert not single.mixed and list(single.tasks) == ["arithmetic"]
    assert yaml.safe_load(to_yaml(single))["task"]["name"] == "arithmetic"
    assert list(run("task=[digits]").tasks) == ["digits"] and run("task=[digits]").mixed


def test_one_task_may_appear_under_two_labels():
    long = "{name: digits, weight: 0.5, args: {min_digits: 9, max_digits: 9}}"
    config = run("task=[digits]", f"+task.long={long}")
    assert [(label, t.name) for label, t in config.tasks.items()] == [
        ("digits", "digits"),
        ("long", "digits"),
    ]
    assert config.tasks["long"].args["min_digits"] == 9 and config.tasks["long"].weight == 0.5


def test_a_file_may_hold_a_mixture(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "both.yaml").write_text(
        "# Both.\nshort: {name: digits, weight: 2}\nsums: {name: arithmetic}\n"
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults: [{override /task: both}, _self_]\n"
        "task: {sums: {weight: 5}}\n"
    )
    assert run("task=both", config_dir=tmp_path).tasks["short"].weight == 2
    config = run("experiment=mine", "task.short.weight=7", config_dir=tmp_path)
    assert [t.weight for t in config.tasks.values()] == [7.0, 5.0]
    # what the experiment says of a label that is still selected counts
    chosen = run("experiment=mine", "task=[both,countdown]", config_dir=tmp_path)
    assert list(chosen.tasks) == ["short", "sums", "countdown"] and chosen.tasks["sums"].weight == 5
    assert run("experiment=mine", "task=digits", config_dir=tmp_path).task.name == "digits"


def test_a_mixture_resumes_as_itself_and_takes_new_weights(tmp_path):
    words = ["task=[digits,arithmetic]", "task.digits.samples_per_prompt=4"]
    config = load([f"run_dir={tmp_path}", *words])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load([f"run_dir={tmp_path}", "resume=auto"])
    assert again == config.model_copy(update={"resume": "auto"})
    heavier = load([f"run_dir={tmp_path}", "resume=auto", "task.arithmetic.weight=4"])
    assert heavier.tasks["arithmetic"].weight == 4
    assert heavier.tasks["digits"].samples_per_prompt == 4


def test_a_task_s_own_rollout_settings_replace_the_run_s_and_no_others():
    config = run(
        *("task=[digits,arithmetic]", "rollout.temperature=0.7", "rollout.stop=[x]"),
        *("task.digits.samples_per_prompt=4", "task.digits.max_new_tokens=9"),
        "task.digits.stop=[]",
    )
    own, usual = config.rollout_of("digits"), config.rollout_of("arithmetic")
    assert (own.samples_per_prompt, own.max_new_tokens, own.stop) == (4, 9, ())
    assert own.temperature == 0.7 and usual == config.rollout and usual.stop == ("x",)


def test_a_task_s_own_temperature_is_its_rollout_s_alone():
    config = run("task=[digits,arithmetic]", "task.digits.temperature=0.6")
    assert config.rollout_of("digits").temperature == 0.6
    assert config.rollout_of("arithmetic").temperature == config.rollout.temperature == 1


def test_tasks_have_environments_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["task=[digits,arithmetic,higher_lower]", "environment=task", "environment.max_turns=2"]
    words += ["rollout.max_new_tokens=20"]
    own = ["task.higher_lower.environment=higher_lower", "task.digits.environment=none"]
    config = run(*words, *own, "task.higher_lower.environment.max_turns=5")
    assert {label: (e.name, e.max_turns) for label, e in config.played.items()} == {
        "arithmetic": ("task", 2),
        "higher_lower": ("higher_lower", 5),
    }
    assert config.environment_of("higher_lower").args == {"guesses": 3}
    assert [config.most_sampled(label) for label in config.tasks] == [20, 40, 100]
    added = "+task.mine={name: digits, environment: games.py:Game}"
    config = run("task=[digits]", added)
    assert {label: (e.name, e.max_turns) for label, e in config.played.items()} == {
        "mine": (f"{tmp_path}/games.py:Game", 8)
    }


def test_an_environment_of_a_task_is_kept_and_changed_on_resume(tmp_path):
    words = ["task=[digits,higher_lower]", "task.higher_lower.environment=higher_lower"]
    config = load([f"run_dir={tmp_path}", *words])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load(
        [f"run_dir={tmp_path}", "resume=auto", "task.higher_lower.environment.max_turns=4"]
    )
    assert again.played["higher_lower"].max_turns == 4 and list(again.played) == ["higher_lower"]
    assert again.environment_of("higher_lower").name == "higher_lower"


PAIR = "task=[digits,arithmetic]"
REFUSED = [
    (["task=[]"], ["task=[]"]),
    (["task=[digits,digits]"], ["digits twice", "+task.LABEL"]),
    (["task=[digits,digit]"], ["task=[digits,digit]", "perhaps digits is meant"]),
    ([PAIR, "task.args.min_digits=2"], ["task.args.min_digits=2", "[digits,arithmetic]", "LABEL"]),
    ([PAIR, "task.sums.weight=2"], ["task.sums.weight=2", "task=[digits,arithmetic]"]),
    ([PAIR, "task.digits.wieght=2"], ["task.digits.wieght=2", "perhaps task.digits.weight"]),
    ([PAIR, "task.digits.weight=-1"], ["task.digits.weight=-1", "greater than or equal to 0"]),
    (
        [PAIR, "task.digits.weight=0", "task.arithmetic.weight=0"],
        ["task.digits.weight=0 task.arithmetic.weight=0", "above 0"],
    ),
    (["task=[digits,file]"], ["task.file.args.grader"]),
    (["+task.long={name: digits}"], ["task.long"]),
    (["task.weight=2"], ["task.weight=2"]),
    (["task=[digits]", "schedule.sampling=by_task"], ["schedule.sampling=by_task", "task=[a,b]"]),
    ([PAIR, "evaluation.tasks={digits: {name: digits}}"], ["evaluation.tasks.digits"]),
    ([PAIR, "+task.a/b={name: digits}"], ["a/b"]),
    (
        [PAIR, "task.digits.samples_per_prompt=1"],
        ["task.digits.samples_per_prompt=1", "algorithm.advantage=grpo"],
    ),
    (
        [PAIR, "task.digits.samples_per_prompt=4", "algorithm.train_on_best=4"],
        ["algorithm.train_on_best=4", "task.digits.samples_per_prompt=4"],
    ),
    (
        [PAIR, "task.digits.max_new_tokens=4096"],
        ["task.digits.max_new_tokens=4096", "model.max_len"],
    ),
    (
        [PAIR, "task.digits.max_new_tokens=9", "algorithm.overlong_share=0.2"],
        ["algorithm.overlong_share=0.2", "64, 9"],
    ),
    ([PAIR, "task.digits.temperature=0"], ["task.digits.temperature=0", "greater than 0"]),
    (
        [PAIR, "task.digits.environment=hilo"],
        ["task.digits.environment=hilo", "higher_lower", "file.py:Class"],
    ),
    (
        [PAIR, "task.digits.environment.name=hilo"],
        ["task.digits.environment.name=hilo", "higher_lower"],
    ),
    (
        [PAIR, "environment=task", "task.digits.environment.max_turns=3"],
        ["task.digits.environment.max_turns", "task.digits.environment.name=NAME"],
    ),
    (
        [PAIR, "task.digits.environment=task", "task.digits.grade_weight=0.5"],
        ["task.digits.environment.name=task", "task.digits.grade_weight=0.5"],
    ),
    (
        [PAIR, "task.digits.environment=task", "task.digits.environment.step_timeout_s=700"],
        ["task.digits.environment.step_timeout_s=700", "task.digits.environment.episode_timeout_s"],
    ),
    (
        [
            *(PAIR, "task.digits.environment=task", "actor=sparse"),
            "actor.sparse.sparse.prompt=dense",
        ],
        ["task.digits.environment.name=task", "actor.sparse.sparse.prompt=dense"],
    ),
    (["task=digits", "task.environment=task"], ["task.environment=task"]),
    ([PAIR, "task.digits.advantage=gea"], ["task.digits.advantage=gea", "rloo", "file.py"]),
    (
        [PAIR, "task.digits.advantage=rloo", "task.digits.samples_per_prompt=1"],
        ["task.digits.advantage=rloo", "task.digits.samples_per_prompt=1"],
    ),
    (
        [PAIR, "correction=rapid", "algorithm=rapid", "task.digits.advantage=rloo"],
        ["task.digits.advantage=rloo", "correction=rapid"],
    ),
    (
        [PAIR, "algorithm.whitening=tokens", "task.digits.advantage=rloo"],
        ["algorithm.whitening=tokens", "rloo and grpo"],
    ),
    (
        [PAIR, "task.digits.difficulty={solved: 0.5, hopeless: 0.5}"],
        ["task.digits.difficulty.hopeless=0.5", "task.digits.difficulty.solved=0.5"],
    ),
    (["task.difficulty.resample_rate=0"], ["task.difficulty.resample_rate=0", "greater than 0"]),
    ([PAIR, "checkpoint.keep_best=eval/sums/greedy"], ["eval/digits/ or eval/arithmetic/"]),
]


@pytest.mark.parametrize(("words", "parts"), REFUSED, ids=lambda v: " ".join(v))
def test_refused_in_one_sentence(words, parts):
    with pytest.raises(UserError) as caught:
        run(*words)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith("."), sentence
    for part in parts:
        assert part in sentence, sentence


@pytest.mark.parametrize("schedule", ["on_policy", "large_batch", "async"])
@pytest.mark.parametrize("sampling", ["fifo", "uniform", "by_task"])
def test_every_schedule_and_order_of_training_goes_with_a_mixture(schedule, sampling):
    config = run(PAIR, f"schedule={schedule}", f"schedule.sampling={sampling}")
    assert config.schedule.sampling == sampling


def test_every_algorithm_goes_with_tasks_of_different_group_sizes():
    sizes = ["task.digits.samples_per_prompt=4", "task.digits.max_new_tokens=9"]
    accepted = []
    for algorithm, best in product(("grpo", "rloo", "gspo", "cispo", "reinforce_pp"), (None, 3)):
        words = [f"algorithm={algorithm}", f"algorithm.train_on_best={best or 'null'}"]
        accepted.append(run(PAIR, *sizes, *words))
    assert len(accepted) == 10


def test_a_setting_of_an_advantage_may_be_for_one_task_alone():
    config = run(PAIR, "algorithm.whitening=tokens", "task.digits.advantage=reinforce_pp")
    assert config.advantage_of("digits") == ("task.digits.advantage", "reinforce_pp")
    assert config.advantage_of("arithmetic") == ("algorithm.advantage", "grpo")
    alone = run(PAIR, "task.digits.advantage=reinforce", "task.digits.samples_per_prompt=1")
    assert alone.rollout_of("digits").samples_per_prompt == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("grader_text=raw", r"task\.grader_text=raw would be ignored"),
        ("overlong_rows=skip", r"task\.overlong_rows=skip is about prompts that are known before"),
    ],
)
def test_an_environment_s_episodes_leave_no_text_and_no_row_to_choose(setting, said):
    with pytest.raises(UserError, match=said):
        run("task=digits", "environment=task", f"task.{setting}")
