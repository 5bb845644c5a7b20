"""Refusals of commands with the remedies that they name: (words, what the sentence says, words in
their place).

A word that begins with "-" takes the words of that beginning away; any other is added, in the place
of one of its key. {NAME} is a file or folder of `test_command_remedies.py`. The verb "prepare" is
everything that is checked before a run.
"""

PLAN = "plan experiment=quickstart run_dir=unused schedule.groups_per_step=8 "
GPU = PLAN + "gpu=h100 shape=qwen3-1.7b "
TOOLS = "plan experiment=tools_quickstart run_dir=unused schedule.steps=8 "
PREPARE = (
    "prepare run_dir=x model=path model.path={model} model.max_len=64 rollout.max_new_tokens=32 "
    "rollout.logprobs_k=4 "
)
MOE = PREPARE.replace("{model}", "{moe}")
REPLAY = "learner.router_replay=true "

FORECASTS = [
    (PLAN, "gpu=NAME", "gpu=h100 shape=qwen3-1.7b"),
    (PLAN, "rates=FILE", "rates={rates}"),
    (PLAN + "gpu=h100", "name one of", "shape=qwen3-1.7b"),
    (PLAN + "rates=/nowhere shape=qwen3-1.7b", "is for gpu=NAME", "-rates= gpu=h100"),
    (PLAN + "rates={rates} shape=qwen3-1.7b", "Change them there", "-shape="),
    (GPU + "picture=a.svg", "actors=1,2,4", "actors=1,2,4"),
    (GPU + "picture=a.svg", "gpus=N", "gpus=8"),
    (GPU + "actors=1,x", "actors=1,2,4", "actors=1,2,4"),
    (GPU + "median_tokens=-1", "positive number", "median_tokens=1"),
    (GPU + "task=[digits,arithmetic]", "Plan each task by itself", "task=digits"),
    (
        GPU + "actor.bf16.rounding=int3 learner.round_as=bf16",
        "round_as=null",
        "learner.round_as=null",
    ),
    (
        GPU + "actor.bf16.rounding=int3 learner.round_as=bf16",
        "rates=FILE",
        "-gpu= -shape= rates={rates}",
    ),
    (GPU + "bitwise=true schedule=on_policy", "bitwise=false", "bitwise=false"),
    (GPU + "bitwise=true schedule=on_policy", "rates=FILE", "-gpu= -shape= rates={rates}"),
    (GPU + "teacher=engine teacher.path={model}", "set 1", "teacher.engine.num_gpus=1"),
    (GPU + "gpus=8 teacher=policy", "leave gpus= out", "-gpus="),
    (GPU + "actor.bf16.speculate={path:x}", "without it", "-actor.bf16.speculate"),
    (
        GPU + "actor.bf16.kv_on_update=keep",
        "kv_on_update=recompute",
        "actor.bf16.kv_on_update=recompute",
    ),
    (GPU + "turns=2", "add environment=NAME", "environment=python_tool"),
    (GPU + "gpus=8 actors=1", "takes none of", "-actors="),
    (PLAN + "gpus=8", "needs gpu=NAME", "gpu=h100 shape=qwen3-1.7b"),
    (GPU + "gpus=1", "at least 2", "gpus=2"),
    (GPU + "variants=fp8", "needs gpus=N", "gpus=8"),
    (GPU + "gpus=8 failures=-1", "positive numbers", "failures=1"),
    (GPU + "gpus=8 actor=[bf16,fp8]", "variants=", "actor=bf16 variants=fp8"),
    (
        GPU + "actors=1,2 actor=[bf16,fp8]",
        "give actor.<label>.count",
        "-actors= actor.bf16.count=2",
    ),
    (
        GPU + "gpus=8 actor=draft actor.draft.draft_path={model}",
        "variants=draft:SHAPE",
        "actor=bf16 -actor.draft variants=draft:qwen3-1.7b",
    ),
    (
        GPU + "actor=draft actor.draft.draft_path={model}",
        "rates=FILE",
        "-gpu= -shape= rates={rates}",
    ),
    (
        PLAN + "rates={rates} critic=model algorithm=ppo",
        "measure a run that has the same",
        "rates={critic_rates}",
    ),
    (TOOLS + "rates={rates}", "add them", "rates={turn_rates}"),
    (PLAN + "rates={turn_rates}", "Give rates of a run without one", "rates={rates}"),
    (TOOLS + "gpu=h100 shape=qwen3-1.7b turns=9", "1 to environment.max_turns=3", "turns=3"),
    (
        "plan experiment=diffusion run_dir=unused gpu=h100 shape=qwen3-1.7b",
        "a causal model",
        "experiment=quickstart",
    ),
]

PREPARED = [
    (PREPARE + "learner.expert_parallel=2 learner.ranks=2", "use 1", "learner.expert_parallel=1"),
    (PREPARE + REPLAY, "learner.router_replay=false", "learner.router_replay=false"),
    (MOE + REPLAY + "actor.bf16.tensor_parallel=2", "use 1", "actor.bf16.tensor_parallel=1"),
    (
        MOE + REPLAY + "actor.bf16.num_gpus=1 learner=gpu actor.bf16.second_runner=false",
        "leave them null",
        "actor.bf16.second_runner=null",
    ),
    (
        MOE + REPLAY + "actor.bf16.num_gpus=1 learner=gpu actor.bf16.prefix_caching=false",
        "prefix_caching=true",
        "actor.bf16.prefix_caching=true",
    ),
    (MOE + "learner.lora={}", "set learner.lora=null", "learner.lora=null"),
    (MOE + "critic=model algorithm=ppo", "choose a dense model", "model.path={model}"),
    (MOE + "actor=fp8", "choose actor=bf16", "actor=bf16"),
    (MOE + "actor.bf16.activations=fp8", "use activations=none", "actor.bf16.activations=none"),
    (MOE + "actor.bf16.num_gpus=1 learner=gpu", "num_gpus=0", "actor.bf16.num_gpus=0"),
    (MOE + "actor.bf16.num_gpus=1 learner=gpu", "choose a dense model", "model.path={model}"),
    (PREPARE.replace("{model}", "{odd_moe}"), "choose a dense model", "model.path={model}"),
    (
        PREPARE.replace("{model}", "{other_moe}") + "learner.router_replay=true",
        "is proven with model_type=qwen3_moe",
        "learner.router_replay=false",
    ),
    (
        PREPARE + "actor=draft actor.draft.draft_path={moe}",
        "choose a dense model",
        "actor.draft.draft_path={model}",
    ),
    (
        PREPARE + "actor=draft actor.draft.draft_path={masked}",
        "choose a causal model",
        "actor.draft.draft_path={model}",
    ),
    (
        PREPARE.replace("{model}", "{masked}"),
        "set model.diffusion={} and actor.*.engine=diffusion",
        "model.diffusion={} actor.bf16.engine=diffusion",
    ),
    (
        PREPARE + "actor=draft actor.draft.draft_path={wide}",
        "the policy's tokenizer",
        "actor.draft.draft_path={model}",
    ),
    (
        "prepare run_dir=x experiment=draft_frozen actor.draft.draft_fresh.vocab_size=40",
        "give both models the same",
        "actor.draft.draft_fresh.vocab_size=64",
    ),
    (
        PREPARE.replace("{model}", "{latent}")
        + "cluster.transport=nccl cluster.full_weights_every=8"
        " actor.bf16.num_gpus=1 learner=gpu",
        "use full_weights_every=1",
        "cluster.full_weights_every=1",
    ),
    (
        PREPARE.replace("{model}", "{latent}")
        + "cluster.transport=nccl cluster.full_weights_every=8"
        " actor.bf16.num_gpus=1 learner=gpu",
        "cluster.transport=object_store",
        "cluster.transport=object_store",
    ),
    (
        "prepare run_dir=x experiment=quickstart task.difficulty={}",
        "task.difficulty.problems=N",
        "task.difficulty.problems=20",
    ),
    (
        PREPARE + "task=gsm8k task.args.train_path=null task.args.heldout_path={rows}",
        "with task.args.train_path",
        "task.args.train_path={rows}",
    ),
    (
        PREPARE + "task=gsm8k task.args.train_path={rows}",
        "with task.args.heldout_path",
        "task.args.heldout_path={rows}",
    ),
    (
        PREPARE + "task=gsm8k task.args.train_path={rows}",
        "evaluation.every=0 evaluation.at_start=false",
        "evaluation.every=0 evaluation.at_start=false",
    ),
    (
        PREPARE + "task=digits task.overlong_rows=skip",
        "use refuse or truncate_left",
        "task.overlong_rows=refuse",
    ),
    (
        "prepare run_dir=x model.max_len=64 rollout.max_new_tokens=32 task=gsm8k"
        " task.args.train_path={rows} task.args.heldout_path={rows}",
        "set model.path",
        "model=path model.path={model}",
    ),
]

OTHERS = [
    ("scale run_dir={run}", "actor.bf16.count=2", "actor.bf16.count=2"),
    ("compare {run} {run} {run2} {run3}", "takes two runs", "-{run3}"),
    ("sweep experiment=quickstart seed=0,1 dry_run=true", "run_dir= is missing", "run_dir=s"),
    ("sweep experiment=quickstart run_dir=s seed=0 dry_run=true", "seed=0,1,2", "seed=0,1,2"),
    (
        "sweep experiment=quickstart run_dir=s seed=0,0 dry_run=true",
        "leave one of the values out",
        "seed=0,1",
    ),
    ("try experiment=quickstart n=0", "1 to", "n=1"),
    ("try experiment=quickstart say=x", "add environment=NAME", "environment=python_tool"),
    (
        "try experiment=tools_quickstart say=x url=http://127.0.0.1:1/v1",
        "give one of them",
        "-url=",
    ),
    ("try experiment=tools_quickstart served=x", "add url=URL", "url=http://127.0.0.1:1/v1"),
    ("prepare-run run_dir={run} experiment=quickstart", "choose another folder", "run_dir=new"),
    ("prepare-run run_dir={run} experiment=quickstart", "resume=auto", "resume=auto"),
    (
        "train run_dir=nowhere resume=auto dry_run=true",
        "holds no run to resume",
        "experiment=quickstart",
    ),
    ("watch once=true run_dir=nowhere", "holds no run: it has no", "run_dir={run}"),
    ("watch once=true", "give run_dir=DIR", "run_dir={run}"),
    ("report {run} y=reward/mean", "format=svg, pdf or csv", "format=csv"),
    ("report {run} y=reward/mean", "is of figures", "-y="),
    ("report {run} format=csv ci=100", "between 1 and 99", "ci=90"),
    ("doctor run={run} gpu=h100", "leave out gpu=h100", "-gpu="),
    ("doctor run=nowhere", "holds no run: it has no", "run={run}"),
    ("doctor gpu=h100 start=false", "such as experiment=", "experiment=quickstart"),
    (
        "train experiment=quickstart dry_run=true resume=auto",
        "run_dir= is missing",
        "run_dir=unused",
    ),
]

USER = "what to give is the user's: a file, a folder, a package"
FACT = "it says what the folder or the answer of another lacks, and names no change"
OTHER = "the remedy is another command or another run, which its own tests make: "
# (words of the pattern of a sentence whose remedy is not applied here, the reason). Every other
# refusal of the package is in a list above; an entry that none needs any more fails the test.
WITHOUT = {
    r"use format=trained, or a run": OTHER + "test_commands.py",
    r"out=.* exists: choose another folder": OTHER + "test_commands.py",
    r"leave one of them out\.": OTHER + "test_commands.py",
    r"holds no valid checkpoint to": FACT,
    r"is not a folder that this user may write": USER,
    r"put the missing rows back": OTHER + "test_dry_run.py",
    r"and none is valid, so resume=auto": OTHER + "test_dry_run.py",
    r"needs the package gguf": USER,
    r"this conversation has|talks to causal models only": OTHER + "test_chat.py",
    r"has no token for any character": USER,
    r"the package .* (cannot be had|did not arrive)": USER,
    r"the package .* has the SHA-256": FACT,
    r"calibrate=true measures": OTHER + "test_kinds_advice.py",
    r"sbatch\.time=": OTHER + "test_launch_command.py",
    r"run_dir=.* has no job": FACT,
    r"learner_memory_gib_per_node|KEY|leaves .* GiB beside|gives the .* GiB": OTHER
    + "test_dry_run.py",
    r"tokenizer without an end of sequence": USER,
    r"made for sparse attention": OTHER + "test_preflight_models.py",
    r"serve on GPUs yet: the GPU check shows engines": OTHER + "test_preflight_models.py",
    r"model\.gpu_check=": OTHER + "test_preflight_models.py",
    r"needs the experts that an engine chose": OTHER + "test_preflight.py",
    r"x .*, each of .* on one": OTHER + "test_launch_command.py",
    r"is in use by|is owned by": OTHER + "test_run_folder_command.py",
    r"cannot be written: .*\.$": FACT,
    r"advises a mix, and actor": FACT,
    r"measure runs that have the same|measure a run of each kind": OTHER + "test_plan_measure.py",
    r"runs=.* is not a run directory": FACT,
    r"is too small for an engine|are too few": USER,
    r"rates=.* cannot be read|rates=.*: .* is wrong": USER,
    r"measured no tokens of|is neither a run directory nor": OTHER + "test_plan.py",
    r"start a Lean server there": USER,
    r"gives the task's grader texts alone": OTHER + "test_preflight.py",
    r"is not below .*grade_timeout_s": OTHER + "test_preflight.py",
    r"holds no config\.json": USER,
    r"step=.* is not accepted: .*metrics": OTHER + "test_replay_command.py",
    r"is not recorded": OTHER + "test_replay_command.py",
    r"differs from the run's|by rlcore replay: it decides": OTHER + "test_replay_command.py",
    r"The run refuses this": "the sentence is the run's: test_scale.py",
    r"run_dir=.* holds no run\.": FACT,
    r"give a number from 1 to": OTHER + "test_scale.py",
    r"no run is going on there": OTHER + "test_scale.py",
    r"held no counts by label|is not a number from 0 to|was not JSON|^\.\* cannot be read": "the"
    " file is a request of rlcore scale: test_scale.py",
    r"takes tokens as a prompt|another folder|cannot be loaded as a causal model": USER,
    r"OWNER/NAME|is gated|shows no repository|no such revision|answers status": OTHER
    + "test_fetch.py",
    r"needs the Hugging Face Hub|cannot be reached|was cut|rlcore fetch|add out=FOLDER": OTHER
    + "test_fetch.py",
    r"calibrate=true starts steps": OTHER + "test_doctor.py",
    r"rates need|in its steady rows|measure them apart": OTHER + "test_plan_measure.py",
    r"refused a request": FACT,
    r"already holds a model: choose": OTHER + "test_preflight_models.py",
    r"args\.heldout_path\.$": OTHER + "test_preflight.py",
    r"has no problems: name a file": USER,
    r"no worked answers to warm up on": OTHER + "test_preflight_models.py",
    r"warmup\.cache_dir=": USER,
}
