"""`rlcore import-config`: asynchronous forms, names that are never harmless, forms of the shell,
and reward functions cut out of scripts. Own wording, in the trainers' forms."""

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import UserError
from rlcore.extras.foreign import import_config, translate
from rlcore.extras.foreign_files import read
from rlcore.extras.foreign_harmless import DANGER, NAMES
from rlcore.extras.foreign_keys import ENTRIES, SOURCES
from rlcore.extras.foreign_rewards import source_of

FULLY = r"""
ROOT=${ROOT:-"${HOME}/work"}
MODEL=${MODEL:-"${ROOT}/models/m"}
prompt=512
answer=1024
tokens=$(((prompt + answer) * 2))
python3 -m verl.experimental.fully_async_policy.fully_async_main \
    actor_rollout_ref.model.path="${MODEL}" data.train_files="$ROOT/t.parquet" \
    data.max_prompt_length=${prompt} data.max_response_length=${answer} \
    data.train_batch_size=0 data.gen_batch_size=1 algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${tokens} \
    rollout.total_rollout_steps=$(((512*400))) \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.partial_rollout=True async_training.use_rollout_log_probs=True
"""
V1 = r"""
python3 -m verl.trainer.main_ppo trainer.use_v1=True trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=2 \
    trainer.v1.sampler.max_off_policy_threshold=3 data.train_batch_size=16 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4
"""
ONE_OFF = r"""
python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_batch_size=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=4
"""
SKY_ONE_OFF = r"""
uv run -m examples.train.async.main_async trainer.train_batch_size=64 \
    trainer.policy_mini_batch_size=32 trainer.policy.model.path=m
"""
ASYNC_TRL = """
import re
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

MARK = re.compile("####")

def ends(text):
    return bool(MARK.search(text))

def right(completions, answer, **kwargs):
    return [float(ends(c) and a in c) for c, a in zip(completions, answer)]

trainer = AsyncGRPOTrainer(model="m", reward_funcs=right, args=AsyncGRPOConfig(output_dir="o",
    max_steps=9, weight_sync_steps=2, chat_template_kwargs={"enable_thinking": False}))
trainer.train()
"""
# text, suffix, eta, H
ASYNCHRONOUS = {
    "verl, fully": (FULLY, ".sh", 2, 4),
    "verl, by default": (FULLY.partition("    async_training")[0], ".sh", 1, 4),
    "verl, V1": (V1, ".sh", 6, 2),
    "verl, a phase behind": (ONE_OFF, ".sh", 4, 4),
    "SkyRL, a phase behind": (SKY_ONE_OFF, ".sh", 2, 2),
    "TRL": (ASYNC_TRL, ".py", 8, 2),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("ROOT", "MODEL"):
        monkeypatch.delenv(name, raising=False)


def translated(tmp_path, text, suffix=".sh"):
    (tmp_path / f"run{suffix}").write_text(text)
    return translate(*read(f"run{suffix}"))


@pytest.mark.parametrize("form", ASYNCHRONOUS)
def test_an_asynchronous_form_stays_asynchronous_with_its_bound(form, tmp_path):
    text, suffix, eta, publish = ASYNCHRONOUS[form]
    found = translated(tmp_path, text, suffix)
    assert found.options["schedule"] == "async" and found.values["schedule.max_staleness"] == eta
    assert found.values["schedule.steps_per_publish"] == publish
    assert not [each.key for each in found.left + found.harmless if "async" in each.key]


def test_variables_in_defaults_and_sums_are_put_in_their_places(tmp_path):
    values = translated(tmp_path, FULLY).values
    assert values["model.path"] == "/home/me/work/models/m"
    assert values["learner.micro_batch_tokens"] == 3072 and values["model.max_len"] == 1536
    assert values["schedule.groups_per_step"] == 32 and values["schedule.steps"] == 6400
    assert values["algorithm.ratio_to"] == "p_inf" and "$" not in str(values)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("A=${A:-8}\nB=$((A * 4))", 32),
        ("A=${A:=${C:-16}}\nB=$(( ( ${A} + 4 ) / 5 ))", 4),
        (': "${B:=$((2**1 + 1))}"', "$((2**1+1))"),
        ("B=$(nproc)", "$(command)"),
        ("A=3\nB=$((A % 2 - -6))", 7),
    ],
)
def test_sums_and_commands_of_the_shell(text, size, tmp_path):
    command = "python3 -m verl.trainer.main_ppo data.max_response_length=$B data.train_batch_size=2"
    (tmp_path / "run.sh").write_text(f"{text}\n{command}\n")
    assert read("run.sh")[1]["data.max_response_length"] == size


def test_a_reference_of_a_yaml_file_is_followed(tmp_path):
    text = "data: {max_response_length: 8, train_batch_size: 4}\nactor_rollout_ref:\n  rollout: "
    (tmp_path / "run.yaml").write_text(text + "{response_length: '${data.max_response_length}'}\n")
    assert read("run.yaml")[1]["actor_rollout_ref.rollout.response_length"] == 8


DANGEROUS = ("stale", "async", "correction", "clip", "ratio", "is_", "kl", "len")
WORDS = sorted({w for names in NAMES.values() for name in names.split() for w in name.split(".")})


@settings(deadline=None)
@given(
    st.sampled_from(SOURCES),
    st.sampled_from(DANGEROUS),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    st.data(),
)
def test_no_key_with_a_dangerous_part_is_harmless(source, part, words, data):
    at = data.draw(st.integers(0, len(words) - 1))
    cut = data.draw(st.integers(0, len(words[at])))
    words[at] = f"{words[at][:cut]}{part}{words[at][cut:]}"
    prefix = data.draw(st.sampled_from(["", "trainer.", "actor_rollout_ref.actor.", "generator."]))
    key = f"{prefix}{'.'.join(words)}"
    found = translate(source, {key: data.draw(st.sampled_from([True, 0.5, 4, "a"]))})
    assert key not in {each.key for each in found.harmless}


@pytest.mark.parametrize("source", SOURCES)
def test_names_of_what_is_harmless_hold_no_dangerous_part_and_are_no_key_of_ours(source):
    names = NAMES[source].split()
    assert len(names) > 20 and not [name for name in names if DANGER.search(name)]
    ours = {name for entry in ENTRIES for name in entry.names(source)}
    assert not ours & set(names)
    longer = [f"{name}_scale" for name in names if not name.endswith("*")]
    found = translate(source, dict.fromkeys(longer, 1))
    assert not [each.key for each in found.harmless if each.key in longer]


VERL = "python3 -m verl.trainer.main_ppo data.train_batch_size=4 data.max_response_length=20 "
CORRECTION = "algorithm.rollout_correction."


@pytest.mark.parametrize(
    ("words", "correction", "settings_"),
    [
        ("rollout_is=token rollout_is_threshold=0.5_4.0", "icepop", {"low": 0.5, "high": 4.0}),
        ("rollout_is=token rollout_is_threshold=3", "tis", {"level": "token", "cap": 3.0}),
        (
            "rollout_rs=seq_mean_k1 rollout_rs_threshold=0.99_1.001",
            "mis",
            {"level": "geometric", "low": 0.99, "high": 1.001},
        ),
        ("rollout_rs=token_k1 rollout_rs_threshold=4", "mis", {"low": 0.25, "high": 4.0}),
    ],
)
def test_corrections_of_verl(words, correction, settings_, tmp_path):
    keys = " ".join(f"{CORRECTION}{word}" for word in words.split())
    found = translated(tmp_path, VERL + keys)
    assert found.options["correction"] == [correction]
    for key, value in settings_.items():
        assert found.values[f"correction.{correction}.{key}"] == value


def test_icepop_of_openrlhf(tmp_path):
    text = "python3 -m openrlhf.cli.train_ppo_ray --train.batch_size 8 --pretrain m "
    text += "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop"
    found = translated(tmp_path, text)
    assert found.options["correction"] == ["icepop"] and found.options["critic"] == "model"
    assert found.values["correction.icepop.high"] == 5.0


def test_what_has_a_counterpart_is_taken_over(tmp_path):
    found = translated(
        tmp_path,
        VERL + "algorithm.adv_estimator=gae algorithm.lam=0.9 critic.optim.lr=1e-5 "
        "data.apply_chat_template_kwargs.enable_thinking=False "
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True "
        "reward.reward_kwargs.overlong_buffer_cfg.len=5 "
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6 "
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7 "
        "reward.custom_reward_function.path=mine.py reward.custom_reward_function.name=score",
    )
    assert (found.options["algorithm"], found.options["critic"]) == ("ppo", "model")
    assert found.values["critic.lam"] == 0.9 and found.values["critic.lr"] == 1e-5
    assert found.values["model.chat_template_args"] == {"enable_thinking": False}
    assert found.values["algorithm.overlong_share"] == 0.25
    assert found.values["algorithm.overlong_penalty"] == 0.5
    assert found.values["evaluation.temperature"] == 0.6 and found.values["evaluation.top_p"] == 0.7
    assert found.values["task.args.grader"] == "mine.py:score"
    assert {each.key for each in found.left} == {"data.val_files", "trainer.total_training_steps"}


def test_functions_of_a_script_are_cut_out_into_a_file_that_loads(tmp_path, capsys):
    (tmp_path / "run.py").write_text(ASYNC_TRL)
    import_config("run.py", "mine")
    assert "task.args.grader=mine/run_rewards.py:right" in capsys.readouterr().out
    spec = importlib.util.spec_from_file_location("cut", tmp_path / "mine" / "run_rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.right(["#### 4", "4"], ["4", "4"]) == [1.0, 0.0]


def test_functions_that_need_a_package_that_is_not_there_are_left_to_the_user(tmp_path, capsys):
    needs = ASYNC_TRL.replace("import re\n", "import re\nfrom not_there.x import helper\n")
    needs = needs.replace("return bool(", "return helper(text) or bool(")
    (tmp_path / "run.py").write_text(needs)
    assert import_config("run.py", "mine") == 3
    assert "not_there.x cannot be imported here" in capsys.readouterr().out
    assert not (tmp_path / "mine" / "run_rewards.py").exists()


def test_what_a_function_uses_goes_with_it_and_nothing_else():
    text = (
        "from __future__ import annotations\nimport math, os\nSCALE = 2\n"
        "if os.environ.get('A'):\n    OTHER = 1\n"
        "class Mark:\n    size = SCALE\n\n@staticmethod\ndef score(text):\n"
        "    return math.sqrt(Mark.size)\n\nprint('trains')\n"
    )
    cut, missing = source_of(text, ["score"])
    assert missing == [] and "print" not in cut and "OTHER" not in cut
    assert cut.index("SCALE") < cut.index("class Mark") < cut.index("@staticmethod")


SETTINGS = """
from trl.experimental.async_grpo import AsyncGRPOConfig as Config
from trl.experimental.async_grpo import AsyncGRPOTrainer

async def right(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]

rewards = [right]
base = {"learning_rate": 3e-6, "max_completion_length": 2 * 512}
args = Config(
    **{**base, "num_generations": 4}, **dict(temperature=0.5), weight_sync_steps=n, **more()
)
args.max_steps = 7
AsyncGRPOTrainer(model="m", args=args, reward_funcs=rewards)
"""


def test_settings_that_a_script_unpacks_are_read_or_left_to_the_user(tmp_path):
    (script := tmp_path / "run.py").write_text(SETTINGS)
    found = translate(*read(str(script)))
    assert found.values["learner.lr"] == 3e-6 and found.values["rollout.temperature"] == 0.5
    assert found.values["rollout.max_new_tokens"] == 1024 and found.values["schedule.steps"] == 7
    assert found.values["rollout.samples_per_prompt"] == 4
    assert found.options["schedule"] == "async"
    assert found.values["task.args.grader"] == [f"{script}:right"]
    left = {each.key: each for each in found.left}
    assert "only running the script" in left["**more()"].reason
    assert left["weight_sync_steps"].value == "$(n)"
    assert left["weight_sync_steps"].reason == "holds a variable: taken as 1"


def test_a_rejection_next_to_verls_ratio_to_the_sampler_is_the_users_choice(tmp_path):
    (script := tmp_path / "run.sh").write_text(
        f"{FULLY.rstrip()} --config-path=config --config-name='fully_async_ppo_trainer.yaml' "
        "rollout.test_freq=5 rollout.total_epochs=3 data.val_files=v.parquet "
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
        "algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01"
    )
    found = translate(*read(str(script)))
    assert found.values["algorithm.ratio_to"] == "p_inf"
    assert found.options["correction"] == ["none"]
    assert found.values["evaluation.every"] == 20  # 5 publications of 4 steps
    said = {each.key: each.reason for each in found.left}
    assert "correction=[mis] with algorithm.ratio_to=p_ref" in said[f"{CORRECTION}rollout_rs"]
    left = set(said)
    assert not left & {"config_path", "config_name", "rollout.test_freq"}
    later = script.read_text().replace("rollout.test_freq=5", "trainer.test_freq=5")
    script.write_text(f"{later} trainer.save_freq=10")
    counted = translate(*read(str(script))).values
    assert counted["evaluation.every"] == 20 and counted["checkpoint.every"] == 40


def test_trainers_that_are_not_read_are_named(tmp_path):
    (areal := tmp_path / "areal.yaml").write_text(
        "seed: 1\ngconfig: {n_samples: 4}\nactor: {eps_clip: 0.4}\nrollout: {temperature: 1.0}"
    )
    with pytest.raises(UserError, match="is of AReaL, which import-config does not read"):
        read(str(areal))
