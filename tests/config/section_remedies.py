"""Refusals that the specifications of all packages say of their settings, with the remedies that
they name: (words of a run, what the sentence says, words in their place).

A word that begins with "-" takes the words of that beginning away; any other is added, in the place
of one of its key.
"""

D = "model=diffusion "
A = "actor.bf16.engine=diffusion "
PLAIN = D + A + "rollout.logprobs_k=0 "
MASKED = PLAIN + "schedule.on_publish=finish "
TEACHER = "teacher=frozen teacher.path=/m "
ENGINE = "teacher=engine "
LEAN = (
    "task.rewards.style.lean.url=http://h task.rewards.style.lean.proof_timeout_s=9 "
    "task.rewards.style.lean.request_timeout_s=9"
)
JUDGE = (
    "task.rewards.style.judge.url=http://h task.rewards.style.judge.model=m "
    "task.rewards.style.judge.rubric=/r "
)
JACKPOT = "correction=jackpot correction.jackpot.normaliser=none correction.jackpot.mode=reweight"
CACHED = "learner.activation_cache_mib=64 "
PHASES = (
    "schedule=on_policy schedule.colocated=true schedule.steps_per_publish=8 "
    "schedule.steps_per_phase=2"
)
NOISE = "actor.bf16.num_gpus=1 actor.bf16.logit_noise=0.1 actor.bf16.async_scheduling=true"
TWO = ENGINE + TEACHER.replace("teacher=frozen ", "") + "teacher.engine.tensor_parallel=2"
REWARD = "task.rewards.style.http.url=http://h/p "
SLURM = "cluster.launch.kind=slurm "
PARTS = (
    "cluster.launch.nodes=2 cluster.launch.learner_nodes=1 cluster.launch.learner_cpus_per_node=9 "
)

SECTIONS = [
    # buffer, loop, corrections
    (
        "algorithm.train_on_best=1 algorithm.dynamic_sampling=true",
        "keep 2 or more",
        "algorithm.train_on_best=2",
    ),
    (
        "correction=[centre,tis] correction.tis.level=sequence",
        "use tis",
        "correction.tis.level=token",
    ),
    (
        "learner.offload_while_sampling=true",
        "leave it false",
        "learner.offload_while_sampling=false",
    ),
    ("correction=[centre] algorithm=gspo", "use algorithm.loss=ppo", "algorithm.loss=ppo"),
    (PHASES, "leave steps_per_phase null", "schedule.steps_per_phase=null"),
    # models
    ("model.fresh.head_dim=7", "must be even", "model.fresh.head_dim=8"),
    (
        "model.warmup.steps=20 model.warmup.lr_schedule=linear model.warmup.lr_warmup_steps=20",
        "or less",
        "model.warmup.lr_warmup_steps=19",
    ),
    (
        "model.warmup.steps=20 model.warmup.lr_schedule=linear model.warmup.lr_warmup_steps=20",
        "=constant",
        "model.warmup.lr_schedule=constant",
    ),
    ("model.chat_template_args={tools:x}", "leave it out", "-model.chat_template_args"),
    (MASKED + "model.warmup.precision=float64", "use float32", "model.warmup.precision=float32"),
    (MASKED + "model.fresh.head_dim=4", "as it must be", "-model.fresh.head_dim="),
    # extras
    (D, "use actor.bf16.engine=diffusion", A),
    (A, "choose model=diffusion", D),
    (A, "or engine=vllm", "actor.bf16.engine=vllm"),
    (D + "actor=sparse actor.sparse.engine=diffusion", "choose bf16", "actor.sparse.kind=bf16"),
    (
        D + "rollout.logprobs_k=0 actor=fp8 actor.fp8.engine=diffusion actor.fp8.rounding=none "
        "actor.fp8.num_gpus=1",
        "rounding=fp8",
        "actor.fp8.rounding=fp8",
    ),
    (
        MASKED + "actor.bf16.tensor_parallel=2",
        "use 1 and raise",
        "actor.bf16.tensor_parallel=1 actor.bf16.count=2",
    ),
    (D + A + "rollout.logprobs_k=4", "use 0", "rollout.logprobs_k=0"),
    (PLAIN, "use finish or abort", "schedule.on_publish=finish"),
    (PLAIN, "use finish or abort", "schedule.on_publish=abort"),
    (MASKED + "environment=python_tool", "use environment=none", "environment=none"),
    (
        MASKED + "learner.num_gpus=1 learner.zero_stage=1 learner.attention=varlen",
        "use sdpa",
        "learner.attention=sdpa",
    ),
    (MASKED + "rollout.stop=[x]", "leave it empty", "-rollout.stop="),
    (MASKED + "rollout.top_p=0.9", "use 1.0", "rollout.top_p=1.0"),
    (MASKED + "correction=jackpot", "use ais", "correction=ais"),
    (
        MASKED + "correction=ais correction.ais.alpha=n_star",
        "use signals",
        "correction.ais.alpha=signals",
    ),
    (MASKED + "learner.ranks=2 learner.tensor_parallel=2", "use 1", "learner.tensor_parallel=1"),
    (MASKED + "rollout.min_p=0.1", "use 0", "rollout.min_p=0"),
    # learner
    (
        "learner.lr_schedule=linear learner.lr_warmup_steps=500 schedule.steps=500",
        "or less",
        "learner.lr_warmup_steps=499",
    ),
    (
        "learner.lr_schedule=linear learner.lr_warmup_steps=500 schedule.steps=500",
        "=constant",
        "learner.lr_schedule=constant",
    ),
    ("critic=value_head critic.lora={}", "lora=null", "critic.lora=null"),
    ("critic=value_head critic.lora={}", "kind=model", "critic.kind=model"),
    ("learner.micro_batch_tokens=0", "above 0", "learner.micro_batch_tokens=64"),
    ("learner.micro_batch_tokens=0", "or auto", "learner.micro_batch_tokens=auto"),
    # objectives: teachers
    ("teacher.path=/m", "use teacher=frozen or engine", "teacher=frozen"),
    ("teacher.path=/m", "leave it out", "-teacher.path="),
    ("teacher=frozen", "set a context", "teacher.context=best"),
    ("teacher=frozen", "a path", "teacher.path=/m"),
    (ENGINE, "give either teacher.path", "teacher.path=/m"),
    (ENGINE + "teacher.path=/m teacher.context=best", "use kind=frozen", "teacher.kind=frozen"),
    (ENGINE + "teacher.path=/m teacher.top_k=null", "give a number", "teacher.top_k=8"),
    (TEACHER + "teacher.paths={digits:/m}", "give one of them", "-teacher.paths"),
    (
        "teacher=frozen teacher.paths={digits:/m} teacher.top_k=null",
        "give a number",
        "teacher.top_k=8",
    ),
    (
        TEACHER + "teacher.tail=sampled teacher.divergence=forward",
        "use tail=bucket",
        "teacher.tail=bucket",
    ),
    (
        TEACHER + "teacher.tail=sampled teacher.divergence=forward",
        "divergence=reverse",
        "teacher.divergence=reverse",
    ),
    (TEACHER + "teacher.top_k=0", "use teacher.tail=sampled", "teacher.tail=sampled"),
    (TEACHER + "teacher.top_k=0", "above 0", "teacher.top_k=4"),
    # rollout
    (
        MASKED + "actor.bf16.precise_layers=1",
        "keep_high_precision",
        "-actor.bf16.precise_layers= actor.bf16.keep_high_precision=[lm_head]",
    ),
    (TWO, "set teacher.engine.num_gpus=1", "teacher.engine.num_gpus=1"),
    (TWO, "or tensor_parallel=1", "teacher.engine.tensor_parallel=1"),
    ("actor.bf16.async_scheduling=true", "leave it null", "actor.bf16.async_scheduling=null"),
    (NOISE, "leave it null", "actor.bf16.async_scheduling=null"),
    # tasks
    ("task.rewards.style.http.url=h", "give http", "task.rewards.style.http.url=http://h/p"),
    (
        REWARD + "task.rewards.style.http.request_timeout_s=9 task.rewards.style.http.deadline_s=5",
        "lower the first",
        "task.rewards.style.http.request_timeout_s=5",
    ),
    (
        REWARD + "task.rewards.style.http.request_timeout_s=9 task.rewards.style.http.deadline_s=5",
        "raise the second",
        "task.rewards.style.http.deadline_s=9",
    ),
    ("task.rewards.style.weight=-0.5", "give one of", REWARD),
    (
        "task.rewards.correct.http.url=http://h/p",
        "not accepted as a label",
        "-task.rewards " + REWARD,
    ),
    (
        "task.rewards.style.http.url=http://h/p task.rewards.style.http.api_key_env=a-b",
        "give its NAME",
        "task.rewards.style.http.api_key_env=KEY",
    ),
    (
        "task.rewards.style.http.url=http://u:p@h/p",
        "leave them out",
        "task.rewards.style.http.url=http://h/p",
    ),
    ("task.grade_weight=0", "grade_weight=1", "task.grade_weight=1"),
    ("task.grade_weight=0", "a weight other than 0", REWARD),
    (
        JUDGE + "task.rewards.style.judge.lowest=5 task.rewards.style.judge.highest=1",
        "of the worst",
        "task.rewards.style.judge.lowest=1 task.rewards.style.judge.highest=5",
    ),
    (LEAN, "lower the first", "task.rewards.style.lean.proof_timeout_s=5"),
    (LEAN, "raise the second", "task.rewards.style.lean.request_timeout_s=20"),
    # launch
    (
        SLURM + "cluster.launch.container_mounts=[a]",
        "SOURCE:TARGET",
        "cluster.launch.container_mounts=[/a:/b]",
    ),
    (
        SLURM + "cluster.launch.sbatch.hetjob=a",
        "makes a job of two parts",
        PARTS + "-cluster.launch.sbatch.hetjob=",
    ),
    (SLURM + "cluster.launch.sbatch.nodes=2", "set ", "-cluster.launch.sbatch.nodes= " + PARTS),
    (SLURM + "cluster.launch.sbatch.output=a", "leave it out", "-cluster.launch.sbatch.output="),
    (
        SLURM + "cluster.launch.sbatch.N=2",
        "write the long name",
        "-cluster.launch.sbatch.N= cluster.launch.sbatch.comment=a",
    ),
    (
        SLURM + PARTS + "cluster.launch.learner_sbatch.nodes=2",
        "leave it out",
        "-cluster.launch.learner_sbatch.nodes=",
    ),
    (
        SLURM + PARTS + "cluster.launch.learner_sbatch.time='9'",
        "sbatch.time",
        "-cluster.launch.learner_sbatch.time= cluster.launch.sbatch.time='9'",
    ),
    (
        SLURM + PARTS + "cluster.launch.learner_sbatch.qos=a",
        "sbatch.qos",
        "cluster.launch.sbatch.qos=b",
    ),
    (
        SLURM + PARTS + "cluster.launch.learner_memory_gib_per_node=9",
        "set it",
        "cluster.launch.memory_gib_per_node=9",
    ),
    (
        SLURM + PARTS + "cluster.launch.min_actor_nodes=1",
        "leave both out",
        "-cluster.launch.min_actor_nodes=",
    ),
    (
        SLURM + PARTS + "cluster.launch.min_actor_nodes=1",
        "the same amounts",
        "-cluster.launch.learner_cpus_per_node=",
    ),
    (
        SLURM + "cluster.launch.sbatch.array=1-3",
        "use rlcore sweep",
        "-cluster.launch.sbatch.array=",
    ),
    (
        SLURM
        + "cluster.launch.nodes=3 cluster.launch.learner_nodes=1 cluster.launch.min_actor_nodes=3",
        "choose at most 2",
        "cluster.launch.min_actor_nodes=2",
    ),
    # several
    ("correction.shadow=[[centre]]", "leave it out", "-correction.shadow="),
    (
        "correction.shadow=[[centre]]",
        "correction=[centre]",
        "-correction.shadow= correction=[centre]",
    ),
    (JACKPOT, "mode=both", "correction.jackpot.mode=both"),
    (JACKPOT, "normaliser=auto", "correction.jackpot.normaliser=auto"),
    (
        "actor.bf16.activations=int8 actor.bf16.enforce_eager=false",
        "leave it null",
        "-actor.bf16.enforce_eager=",
    ),
    (MASKED + "learner.lora.targets=[ff_out]", "only", "learner.lora.targets=[q_proj]"),
    (
        MASKED + "actor.bf16.enforce_eager=true",
        "leave it at",
        "-actor.bf16.enforce_eager=",
    ),
    (MASKED + "evaluation.top_p=0.9", "leave both null", "evaluation.top_p=null"),
    (MASKED + "learner.router_replay=true", "leave it off", "learner.router_replay=false"),
    (
        "cluster.launch.kind=kubernetes cluster.launch.tolerations=[{a:b}]",
        "choose among",
        "cluster.launch.tolerations=[{key:b}]",
    ),
    ("cluster.launch.env.WANDB_API_KEY=x", "export it", "-cluster.launch.env"),
    (CACHED + "learner.ref_pass=always", "choose one", "learner.ref_pass=auto"),
    ("learner.fused_head=true", "leave it false", "learner.fused_head=false"),
    (CACHED + "learner=zero3", "choose zero_stage=0, 1 or 2", "learner.zero_stage=2"),
    (
        "actor.bf16.share.start=0.5 actor.bf16.share.shape=linear",
        "choose constant",
        "actor.bf16.share.shape=constant",
    ),
    (
        "task.difficulty.hopeless=0.9 task.difficulty.solved=0.5",
        "not below",
        "task.difficulty.hopeless=0.1",
    ),
]

# (words of the pattern of a sentence whose remedy is not applied here, the reason). An entry that
# no refusal needs any more fails the test.
FOLDER = "no configuration reads a model's folder: tests/rollout/test_rollout_checks.py"
WITHOUT = {
    r"cannot serve .* on a CPU": FOLDER,
    r"engine=vllm is proven for a .* with": FOLDER,
    r"is not proven with recurrent layers": FOLDER,
    r"is beyond the .* positions": FOLDER,
    r"does not divide the model's": FOLDER,
    r"its tokenizer has token id": FOLDER,
    r"has another vocabulary": FOLDER,
    r"remove the factor from config\.json": FOLDER,
}
