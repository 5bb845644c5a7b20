"""Every command on a real pretrained chat model: `rlcore sft`, LoRA training, `rlcore export`,
`rlcore eval`. What they write is an ordinary model folder: plain transformers and plain vLLM answer
from it alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import rows
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]

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


def test_sft_teaches_the_form_of_the_answer_and_both_engines_read_the_result(smollm2, supervised):
    tokenizer, before = plain_answers(smollm2)
    assert not any(tokenizer.decode(a, skip_special_tokens=True).isdigit() for a in before)
    tokenizer, after = plain_answers(supervised)
    assert all(tokenizer.decode(a, skip_special_tokens=True).isdigit() for a in after)
    assert all(a[-1] == tokenizer.eos_token_id for a in after)
    assert vllm_answers(supervised, prompts_of(tokenizer)) == after


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
