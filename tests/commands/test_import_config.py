"""`rlcore import-config`: what is translated passes a dry run, what is not is listed; and every
configuration that five trainers ship."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from rlcore.cli import main
from rlcore.config.compose import load
from rlcore.config.sentences import keys
from rlcore.errors import UserError
from rlcore.extras.foreign import _fetched, experiment, translate
from rlcore.extras.foreign_files import read
from rlcore.extras.foreign_harmless import DANGER
from rlcore.extras.foreign_keys import ENTRIES, SOURCES
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

VERL = {
    "data": {
        "train_files": "train.jsonl",
        "val_files": ["train.jsonl"],
        "train_batch_size": 16,
        "max_prompt_length": 16,
        "max_response_length": 16,
    },
    "actor_rollout_ref": {
        "model": {"path": "model", "lora_rank": 0},
        "actor": {
            "_target_": "verl.workers.config.FSDPActorConfig",
            "ppo_mini_batch_size": 4,
            "clip_ratio": 0.2,
            "clip_ratio_high": 0.28,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "loss_agg_mode": "seq-mean-token-sum",
            "optim": {"lr": 1e-6, "lr_warmup_steps": -1},
        },
        "rollout": {"n": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
    },
    "algorithm": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": False,
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 3.0},
    },
    "trainer": {"total_training_steps": 8, "test_freq": -1, "nnodes": 1},
}
TRL = """
model_name_or_path: model
dataset_name: train.jsonl
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 4
max_completion_length: 16
learning_rate: 1.0e-5
loss_type: dapo
epsilon: 0.2
epsilon_high: 0.28
beta: 0.0
top_p: 0.9
max_steps: 6
lr_scheduler_type: constant_with_warmup
use_vllm: true
vllm_importance_sampling_correction: true
vllm_importance_sampling_mode: token_truncate
vllm_importance_sampling_cap: 2.5
"""
OPENRLHF = r"""
python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain model --prompt_data train.jsonl --input_key question --label_key answer \
   --n_samples_per_prompt 4 --rollout_batch_size 8 --train_batch_size 32 \
   --prompt_max_len 16 --generate_max_len 16 \
   --advantage_estimator reinforce_baseline --eps_clip_low_high 0.2 0.27 \
   --actor_learning_rate 5e-7 --init_kl_coef 1e-3 --kl_estimator k3 --use_kl_loss \
   --async_train --partial_rollout --async_queue_size 2 --enable_vllm_is_correction \
   --remote_rm_url http://127.0.0.1:5000/get_reward --colocate_all_models
"""
# The forms of 2026: dotted options in arrays and variables.
OPENRLHF_ARRAYS = r"""
WORK=$HOME/exp
MODEL_PATH="model"
: "${ROWS:=train.jsonl}"
CKPT_ARGS=(
   --actor.model_name_or_path ${MODEL_PATH}
   # --reward.model_name_or_path ${REWARD_MODEL}
   --ckpt.path "${WORK}/ckpt"
   --ckpt.save_steps 10
)
ROLLOUT_ARGS=(
   --reward.remote_url mine.py
   --data.prompt_dataset $ROWS
   --data.input_key question --data.label_key answer
   --data.max_len $((16 * 2))
   --rollout.max_new_tokens 16
   --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --train.batch_size 32
   --train.async_enable
   --algo.dynamic_filtering_range 0.0 1.0)
OTHER=(--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 1e-5 --algo.kl.use_loss
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis
   --train.agent_func_path agent.py)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/o"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} "${OTHER[@]}" $@
"""
TRL_SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

STEPS = 6

def short(completions, **kwargs):
    return [0.0 for _ in completions]

if __name__ == "__main__":
    dataset = load_dataset("train.jsonl", split="train")
    args = GRPOConfig(output_dir="out", per_device_train_batch_size=16, num_generations=4,
                      max_completion_length=16, max_steps=STEPS, use_vllm=True, beta=0.04,
                      learning_rate=rate(), reward_weights=[1.0, 0.5])
    args.bf16 = True
    GRPOTrainer(model="model", args=args, reward_funcs=[accuracy_reward, short],
                peft_config=LoraConfig(r=8, lora_alpha=32)).train()
"""
SKYRL = r"""
: "${DATA_DIR:="$HOME/data"}"
: "${NUM_GPUS:=4}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  trainer.policy.model.path="model" trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  generator.inference_engine.num_engines=$NUM_GPUS trainer.train_batch_size=32 \
  trainer.policy_mini_batch_size=32 trainer.fully_async.enabled=true \
  trainer.fully_async.max_staleness_steps=3 trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.off_policy_correction.tis_ratio_type=sequence \
  environment.env_class=gsm8k trainer.micro_forward_batch_size_per_gpu=8 $@
"""
PRIME_RL = """
max_steps = 20
seq_len = 64

[model]
name = "model"

[deployment]
num_train_gpus = 1

[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 2

[[orchestrator.train.source]]
name = "reverse-text"

[trainer.optim]
lr = 3e-6
"""
FILES = {"verl.yaml": yaml.safe_dump(VERL), "trl.yaml": TRL, "openrlhf.sh": OPENRLHF}
HERE = ("learner.num_gpus=0", "learner.zero_stage=0", "actor.bf16.num_gpus=0")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    row = {"prompt": "1+1", "question": "1+1", "answer": "2", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    (tmp_path / "graders.py").write_text("def grade(item, response):\n    return 1.0\n")


def translated(name):
    source, given = read(name)
    found = translate(source, given)
    left = {each.key: each.reason for each in found.left}
    return source, found.values, found.options, left


def harmless(name):
    return {each.key for each in translate(*read(name)).harmless}


def test_a_configuration_of_verl():
    source, values, options, left = translated("verl.yaml")
    assert source == "verl" and options["schedule"] == "large_batch"
    assert values["schedule.groups_per_step"] == 4 and values["schedule.steps_per_publish"] == 4
    assert (values["algorithm.eps_low"], values["algorithm.eps_high"]) == (0.2, 0.28)
    assert values["algorithm.kl_coef"] == 0.001 and values["algorithm.kl_estimator"] == "k3"
    assert values["algorithm.advantage"] == "dr_grpo" and values["model.max_len"] == 32
    assert options["correction"] == ["tis"] and values["correction.tis.cap"] == 3.0
    assert set(left) == {"actor_rollout_ref.actor.loss_agg_mode"}
    assert harmless("verl.yaml") == {"trainer.nnodes"}
    assert not {"evaluation.every", "rollout.top_k", "learner.lora.rank"} & set(values)


def test_a_kl_in_the_reward_stays_there(tmp_path):
    (tmp_path / "openrlhf.sh").write_text(OPENRLHF.replace(" --use_kl_loss", ""))
    _, values, _, left = translated("openrlhf.sh")
    assert values["algorithm.kl_in"] == "reward" and values["algorithm.kl_coef"] == 0.001
    assert "algorithm.kl_estimator" not in values and "init_kl_coef" not in left


def test_a_configuration_of_trl():
    source, values, options, left = translated("trl.yaml")
    assert source == "trl" and options["correction"] == ["tis"]
    assert values["schedule.groups_per_step"] == 4 and values["schedule.steps_per_publish"] == 2
    assert values["correction.tis.level"] == "token" and values["correction.tis.cap"] == 2.5
    assert values["algorithm.aggregation"] == "token-mean" and values["rollout.top_p"] == 0.9
    assert "top_p" not in left and "one process" in left["per_device_train_batch_size"]


def test_trls_masks_become_mis(tmp_path):
    (tmp_path / "trl.yaml").write_text(TRL.replace("token_truncate", "sequence_mask"))
    _, values, options, _ = translated("trl.yaml")
    assert options["correction"] == ["mis"] and values["correction.mis.level"] == "sequence"
    assert (values["correction.mis.low"], values["correction.mis.high"]) == (0.0, 2.5)


def test_a_command_line_of_openrlhf():
    source, values, options, left = translated("openrlhf.sh")
    assert source == "openrlhf" and options["schedule"] == "async"
    assert values["schedule.groups_per_step"] == 8 and values["schedule.max_staleness"] == 2
    assert values["schedule.on_publish"] == "in_flight" and values["learner.lr"] == 5e-7
    assert (values["algorithm.eps_low"], values["algorithm.eps_high"]) == (0.2, 0.27)
    assert values["algorithm.advantage"] == "reinforce_pp_baseline"
    assert "task.rewards" in left["reward.remote_url"] and "--max_steps" not in left


def test_a_script_of_openrlhf_with_arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.sh").write_text(OPENRLHF_ARRAYS)
    source, values, options, left = translated("run.sh")
    assert source == "openrlhf" and values["model.path"] == "model"
    assert values["task.args.train_path"] == "train.jsonl" and values["model.max_len"] == 32
    assert values["task.args.grader"] == "mine.py:reward_func" and values["checkpoint.every"] == 10
    assert values["schedule.groups_per_step"] == 8 and options["schedule"] == "async"
    assert options["correction"] == ["mis"] and values["correction.mis.level"] == "geometric"
    assert values["algorithm.kl_coef"] == 1e-5 and values["learner.betas"] == [0.9, 0.95]
    assert harmless("run.sh") == {"ckpt.path"}
    assert {"train.agent_func_path", "actor.lr_scheduler", "actor.lr_warmup_ratio"} <= set(left)
    assert read("run.sh")[1]["ckpt.path"] == "/home/me/exp/ckpt"


def test_a_python_script_of_trl_is_read_and_not_run(tmp_path):
    (tmp_path / "train_grpo.py").write_text(TRL_SCRIPT)
    source, values, options, left = translated("train_grpo.py")
    assert source == "trl" and options["correction"] == ["mis"]
    assert values["task.args.grader"] == ["trl.rewards:accuracy_reward", "train_grpo.py:short"]
    assert values["task.args.grader_weights"] == [1.0, 0.5]
    assert (values["schedule.steps"], values["schedule.groups_per_step"]) == (6, 4)
    assert (values["learner.lora.rank"], values["learner.lora.alpha"]) == (8, 32)
    assert values["algorithm.kl_coef"] == 0.04 and values["learner.lr_schedule"] == "linear"
    assert "give learner.lr" in left["learning_rate"]
    assert harmless("train_grpo.py") == {"output_dir", "bf16"}


def test_a_script_of_skyrl(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.sh").write_text(SKYRL)
    source, values, options, left = translated("run.sh")
    assert source == "skyrl" and values["task.args.train_path"] == "/home/me/data/train.parquet"
    assert options["schedule"] == "async" and values["schedule.max_staleness"] == 3
    assert options["correction"] == ["tis"] and values["correction.tis.cap"] == 5.0
    assert values["rollout.samples_per_prompt"] == 5 and "algorithm.kl_coef" not in values
    assert "give task.args.grader" in left["environment.env_class"]
    assert "trainer.micro_forward_batch_size_per_gpu" in harmless("run.sh")


def test_a_toml_file_of_prime_rl(tmp_path):
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    source, values, options, left = translated("rl.toml")
    assert source == "prime_rl" and options["algorithm"] == "dppo"
    assert options["correction"] == ["dppo"] and values["correction.dppo.high"] == 0.2
    assert options["schedule"] == "async" and values["schedule.max_staleness"] == 2
    assert values["schedule.groups_per_step"] == 8 and values["learner.lr"] == 3e-6
    assert values["algorithm.advantage"] == "dr_grpo" and values["model.max_len"] == 64
    assert {"orchestrator.train.source", "trainer.loss.type"} <= set(left)
    assert harmless("rl.toml") == {"deployment.num_train_gpus"}


def test_a_reward_function_that_verl_names_is_taken_over(tmp_path):
    own = {"path": "mine.py", "name": "score", "reward_kwargs": {"strict": True}}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(VERL | {"custom_reward_function": own}))
    _, values, _, left = translated("verl.yaml")
    assert values["task.args.grader"] == "mine.py:score"
    assert values["task.args.grader_args"] == {"strict": True}
    assert not any("reward" in key for key in left)


def test_the_exit_code_is_0_where_nothing_is_left_to_the_user(tmp_path, capsys):
    own = {"custom_reward_function": {"path": "graders.py", "name": "grade"}}
    text = yaml.safe_dump(VERL | own).replace("seq-mean-token-sum", "token-mean")
    (tmp_path / "verl.yaml").write_text(text)
    assert main(["import-config", "verl.yaml"]) == 0
    assert "you must act (0):" in capsys.readouterr().out


def test_a_command_line_of_verl(tmp_path):
    (tmp_path / "run.sh").write_text(
        "set -x\npython3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=rloo \\\n"
        "  data.train_files=$NOWHERE/train.parquet data.train_batch_size=64 \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=64 +trainer.extra.key=1 $@\n"
    )
    source, values, options, left = translated("run.sh")
    assert source == "verl" and options["schedule"] == "on_policy"
    assert values["algorithm.advantage"] == "rloo" and values["schedule.groups_per_step"] == 64
    assert "not known here" in left["trainer.extra.key"]
    assert "holds a variable" in left["data.train_files"]


def test_names_of_the_hub_come_with_the_commands_that_bring_them():
    values = {"model.path": "Qwen/Qwen3-8B", "task.args.train_path": ["hf:a/rows", "d/t.parquet"]}
    commands = ["rlcore fetch Qwen/Qwen3-8B", "rlcore fetch a/rows kind=dataset"]
    assert list(_fetched(values)) == commands


def test_our_side_of_the_table_is_the_schema():
    ours = {key.replace(".LABEL.", ".bf16.") for key in keys()} | {
        f"task.args.{name}_path" for name in ("train", "heldout")
    }
    ours |= {f"task.args.{name}_field" for name in ("question", "answer")}
    assert {entry.ours for entry in ENTRIES} - ours == set()
    for source in SOURCES:
        named = [name for entry in ENTRIES for name in entry.names(source) if name]
        assert len(named) == len(set(named)) > 25


@pytest.mark.parametrize("name", FILES)
def test_the_result_passes_a_dry_run(name, tmp_path, capsys):
    small = FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=32)
    build_fresh_model(tmp_path / "model", "0123456789+", small, seed=0, max_len=64)
    assert main(["import-config", name, "out=mine"]) == 3
    said = capsys.readouterr().out
    assert "same (" in said and "harmless (" in said and "you must act (" in said
    assert "still missing: task.args.grader" in said
    words = ["config_dir=mine", f"experiment={name.partition('.')[0]}", "run_dir=x", *HERE]
    words += ["task.args.grader=graders.py:grade", "model.max_len=64", "dry_run=true"]
    assert main(["train", *words]) == 0
    assert "nothing is started" in capsys.readouterr().out
    assert main(["import-config", name, "out=mine"]) == 2
    assert "exists: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n", "holds no settings of verl"),
        ("a: [\n", "cannot be read"),
        ("[" * 3000, "cannot be read"),
        ("", "holds no settings of verl"),
    ],
)
def test_other_files_are_refused_in_a_sentence(text, said, tmp_path, capsys):
    (tmp_path / "other.yaml").write_text(text)
    assert main(["import-config", "other.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


# Every configuration that five trainers ship, at pinned commits, is imported as what it is.
# tests/data/foreign_corpus.json lists (repository, file, trainer, schedule, max_staleness). The
# repositories are cloned into cache/peers, or read from $RLCORE_PEERS/OWNER+NAME.


ROOT = Path(__file__).parents[2]
CORPUS = json.loads((ROOT / "tests/data/foreign_corpus.json").read_text())
GIVEN = {"model.path": "m", "task.args.grader": "a.py:f", "task.args.train_path": "t.jsonl"}
# Contradictions of the files, which ours refuses: a grader of other groups, an engine too short.
REFUSED = ("compares the samples of a group", "leaves no tokens for a prompt", "rollout.logprobs_k")


def checkout(repository):
    """A git folder that holds the pinned commit, or a skip."""
    own = Path(os.environ.get("RLCORE_PEERS", "/nowhere")) / repository.replace("/", "+")
    folder = own if own.exists() else ROOT / "cache/peers" / repository
    folder = folder / "repo" if (folder / "repo").exists() else folder
    if not folder.exists():
        url = f"https://github.com/{repository}"
        call = ["git", "clone", "-q", "--bare", "--filter=blob:none", url, str(folder)]
        if subprocess.run(call, timeout=600, check=False, capture_output=True).returncode:
            pytest.skip(f"{repository} cannot be cloned from here")
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("repository", CORPUS["commits"])
def test_shipped_configurations_are_imported_as_what_they_are(repository, tmp_path):
    folder, commit = checkout(repository), CORPUS["commits"][repository]
    rows = [row for row in CORPUS["files"] if row[0] == repository]
    wrong = []
    for at, (_, file, source, schedule, eta) in enumerate(rows):
        shown = subprocess.run(
            ["git", "-C", str(folder), "show", f"{commit}:{file}"], capture_output=True, check=True
        )
        path = tmp_path / f"{at}{Path(file).suffix}"
        path.write_bytes(shown.stdout)
        found_source, given = read(str(path))
        found = translate(found_source, given)
        got = [found_source, found.options["schedule"], found.values.get("schedule.max_staleness")]
        if got != [source, schedule, eta]:
            wrong.append(f"{file}: {got} is not {[source, schedule, eta]}")
        wrong += [f"{file}: harmless {h.key}" for h in found.harmless if DANGER.search(h.key)]
        wrong += refused(found, tmp_path / str(at), file)
    assert len(rows) > 5 and not wrong, "\n".join(wrong)


def refused(found, folder, file):
    """The refusal of the experiment, once what only the user can give is given."""
    target = folder / "experiment" / "x.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(experiment(found, "x"))
    more = [f"{key}={value}" for key, value in GIVEN.items() if key not in found.values]
    try:
        load(["experiment=x", "run_dir=r", *more], str(folder))
    except UserError as e:
        return [] if any(words in str(e) for words in REFUSED) else [f"{file}: {e}"]
    return []
