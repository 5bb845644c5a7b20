"""Refusals of the rules over several sections of a run (rlcore/config), with the remedies that they
name: (words of a run, what the sentence says, words in their place), as in section_remedies.py.
"""

TWO = "actor=[bf16,fp8] actor.fp8.rounding=fp8 actor.fp8.num_gpus=0 "
COLOCATED = "schedule=on_policy schedule.colocated=true "
MASKED = (
    "model=diffusion actor.bf16.engine=diffusion rollout.logprobs_k=0 schedule.on_publish=finish "
)
TASKS = "task=[digits,arithmetic] "
ALONE = "rollout.samples_per_prompt=1 algorithm.advantage=reinforce "
CRITIC = "critic=model algorithm=ppo "
TEACHER = "teacher=frozen teacher.path=/m "
ENGINE = "teacher=engine teacher.path=/m "
POLICY = "teacher=policy "
PLAYED = "environment=python_tool task=arithmetic "
KEYED = (
    "task=mbpp task.args.train_path=/r task.args.confinement=reduced "
    "task.rewards.style.http.url=http://h/p task.rewards.style.http.api_key_env=RL_KEY "
)

SETTINGS = [
    # kinds of actors
    ("actor.bf16.correction=[tis]", "set correction.", "-actor.bf16.correction correction=[tis]"),
    (
        TWO + "correction=[dvp] actor.fp8.correction=[tis]",
        "or in neither",
        "correction=[tis]",
    ),
    (
        TWO + "correction=[dvp] actor.fp8.correction=[tis]",
        "in both",
        "actor.fp8.correction=[dvp]",
    ),
    ("actor.bf16.share=0.5", "leave it out", "-actor.bf16.share"),
    (TWO + "actor.bf16.share=0.7 actor.fp8.share=0.7", "add up to 1", "actor.fp8.share=0.3"),
    ("correction.shadow=[tis]", "write correction.shadow=", "correction.shadow=[[tis],[veto,ais]]"),
    (
        TWO + "actor.fp8.correction=[tis] actor.fp8.correction.strata=none",
        "set correction.strata",
        "-actor.fp8.correction.strata correction.strata=none",
    ),
    (
        TWO + "actor.fp8.correction=[tis] actor.fp8.correction.shadow=[[tis]]",
        "set correction.shadow",
        "-actor.fp8.correction.shadow correction.shadow=[[tis]]",
    ),
    # places
    (
        "learner.offload_while_sampling=true",
        "leave it false",
        "learner.offload_while_sampling=false",
    ),
    (COLOCATED + MASKED, "use engine=vllm", "model=tiny actor.bf16.engine=vllm"),
    (COLOCATED + "actor.bf16.tensor_parallel=2", "use 1", "actor.bf16.tensor_parallel=1"),
    (
        COLOCATED + "evaluation.dense_actor=true actor=sparse actor.sparse.num_gpus=0",
        "leave it null",
        "evaluation.dense_actor=null",
    ),
    (COLOCATED + "actor.bf16.num_gpus=1", "must be 1, or each 0", "actor.bf16.num_gpus=0"),
    (COLOCATED + "learner.ranks=2", "both the same number", "actor.bf16.count=2"),
    (
        COLOCATED + "actor.bf16.num_gpus=1 learner=gpu cluster.transport=ipc actor.bf16.count=2",
        "use object_store",
        "cluster.transport=object_store",
    ),
    (
        COLOCATED + "actor.bf16.num_gpus=1 learner=gpu cluster.transport=ipc actor.bf16.count=2",
        "or as many",
        "actor.bf16.count=1",
    ),
    (
        COLOCATED + "actor.bf16.num_gpus=1 learner=gpu cluster.transport=nccl",
        "use ipc",
        "cluster.transport=ipc",
    ),
    # critics and teachers
    ("algorithm=ppo critic.lr=1e-3", "use critic=value_head", "critic=value_head"),
    ("algorithm=ppo critic.lr=1e-3", "or critic=model", "critic=model"),
    ("critic=model", "use algorithm=ppo", "algorithm=ppo"),
    ("critic=model", "or critic=none", "critic=none"),
    (
        CRITIC + "critic.traces=vtrace correction=[mis] correction.mis.level=sequence",
        "critic.traces=gae",
        "critic.traces=gae",
    ),
    (
        CRITIC + "critic.traces=vtrace correction=[mis] correction.mis.level=sequence",
        "tis is usual",
        "correction=[tis] -correction.mis",
    ),
    ("algorithm.reward_weight=0", "use teacher=frozen", TEACHER),
    ("algorithm.reward_weight=0", "a weight above 0", "algorithm.reward_weight=0.5"),
    (
        POLICY + ALONE + "teacher.context=best",
        "use 2 or more",
        "rollout.samples_per_prompt=2",
    ),
    (POLICY + "teacher.context=feedback", "or context=best", "teacher.context=best"),
    (POLICY + "teacher.context=feedback", "use an environment", "environment=attempts"),
    (
        TEACHER + "teacher.tail=sampled correction=[dvp]",
        "teacher.tail=bucket",
        "teacher.tail=bucket",
    ),
    (TEACHER + "teacher.tail=sampled correction=[dvp]", "or drop", "teacher.tail=drop"),
    (ENGINE + "rollout.temperature=0.5", "use 1", "rollout.temperature=1"),
    (ENGINE + "rollout.temperature=0.5", "or teacher=frozen", "teacher=frozen"),
    (
        COLOCATED + ENGINE + "actor.bf16.num_gpus=1 learner=gpu",
        "or teacher=frozen",
        "teacher=frozen",
    ),
    (
        COLOCATED + ENGINE + "actor.bf16.num_gpus=1 learner=gpu",
        "schedule.colocated=false",
        "schedule.colocated=false",
    ),
    (
        ENGINE + "teacher.engine.timeout_s=600 rollout.request_timeout_s=600",
        "give less",
        "teacher.engine.timeout_s=60",
    ),
    ("teacher=frozen teacher.paths={x:/m}", "not a task of the run", "teacher.paths={digits:/m}"),
    (TEACHER + "teacher.engine.num_gpus=1", "use teacher=engine", "teacher=engine"),
    (TEACHER + "teacher.engine.num_gpus=1", "or leave them out", "-teacher.engine"),
    # tasks
    (
        ALONE + "algorithm.dynamic_sampling=true",
        "use 2 or more",
        "rollout.samples_per_prompt=2",
    ),
    (
        ALONE + "algorithm.dynamic_sampling=true",
        "or dynamic_sampling=false",
        "algorithm.dynamic_sampling=false",
    ),
    (
        TASKS + "task.digits.environment.max_turns=9",
        "add task.digits.environment.name",
        "-task.digits.environment",
    ),
    (PLAYED + "task.grader_text=raw", "leave it clean", "task.grader_text=clean"),
    (PLAYED + "task.grader_text=raw", "or use environment=none", "environment=none"),
    (PLAYED + "task.overlong_rows=skip", "leave it refuse", "task.overlong_rows=refuse"),
    (PLAYED + "task.overlong_rows=skip", "or use environment=none", "environment=none"),
    (
        "task.rewards.style.http.url=http://h/p task.rewards.style.http.request_timeout_s=900 "
        "task.rewards.style.http.deadline_s=9000",
        "lower the first",
        "task.rewards.style.http.deadline_s=10 task.rewards.style.http.request_timeout_s=9",
    ),
    (KEYED, "use confinement=full", "task.args.confinement=full"),
    (
        "task=lean task.rewards.proof.lean.url=http://h task.args.train_path=/r "
        "task.grade_weight=1",
        "task.grade_weight=null",
        "task.grade_weight=null",
    ),
    (
        "task.rewards.style.lean.url=http://h",
        "use it with task=lean",
        "-task.rewards task=lean task.rewards.proof.lean.url=http://h task.args.train_path=/r",
    ),
    (
        TASKS + "task.digits.weight=0 task.arithmetic.weight=0",
        "a weight above 0",
        "task.digits.weight=1",
    ),
    (
        TASKS + "algorithm.overlong_share=0.5 task.digits.max_new_tokens=8",
        "give them the same",
        "task.digits.max_new_tokens=null",
    ),
    (
        TASKS + "algorithm.overlong_share=0.5 task.digits.max_new_tokens=8",
        "or leave it 0",
        "algorithm.overlong_share=0",
    ),
    (TASKS + "task.args.digits=3", "write task.LABEL.", "-task.args task.digits.args.digits=3"),
    ("task=[]", "choose at least one", "task=[digits]"),
    (
        "task=[digits,digits]",
        "+task.LABEL=",
        "task=[digits] +task.two={name:digits,args:{}}",
    ),
    # words and folders
    ("model=path", "give model.path=VALUE", "model.path=/m"),
    ("experiment=async_staleness", "max_staleness=8", "-experiment schedule.max_staleness=8"),
    ("learner.lr=${", "close it by }", "learner.lr=1"),
]

# of the command line: the words begin with a command
WORDS = [
    ("planx", "perhaps plan", "-planx plan"),
    ("watch --once", "such as once=VALUE", "---once once=true"),
    ("watch once", "its words are key=value", "-once once=true"),
    ("watch onse=true", "perhaps once", "-onse once=true"),
    ("try experiment=quickstart n=x", "give a whole number", "n=0"),
    ("plan measure runs=r out=", "has no value", "-out= out=o"),
    ("fetch a b", "takes at most 1 OWNER/NAME", "-b"),
    ("plan measure runs=r", "out= is missing", "out=o"),
    ("train gpu=h100 experiment=nope", "add it", "dry_run=true"),
    ("train gpu=h100 experiment=nope", "or leave gpu out", "-gpu="),
    ("watch --help onse", "perhaps once is meant", "-onse once"),
    ("train config_dir=/nowhere experiment=nope", "give one that holds", "config_dir=configs"),
    ("train model=smollm2 data=/r reward=x", "or a task that grades rows", "reward=gsm8k"),
    ("train model=smollm2 data=/r", "reward= is missing", "reward=gsm8k"),
    ("train model=smollm2 reward=gsm8k", "give data=FILE", "data=/r"),
    ("sweep run_dir=s experiment=nope seed=glob(*)", "write key=a,b,c", "seed=0,1"),
]

USER = "what to give is the user's: a file, a value"
INSTALLED = "an installation or a contributor's folder is not whole: test_config_names.py"
OTHER = "its own test applies the remedy: "
WITHOUT = {
    r"must not be blank|does not compose|cannot be read as a run's|holds no keys": USER,
    r"The shipped|has no entry: add|is the folder of no section|yaml is missing: ": INSTALLED,
    r"where .* has .*: omit|cannot be resumed with": OTHER + "test_config_resuming.py",
    r"lacks .*: set": OTHER + "test_engines.py",
    r"has two tasks of the label": OTHER + "test_task_mixture.py",
    r"draft actor of the run": "only a draft has a model: it names another run",
    r"kind=draft, whose run has a further engine": "it names no change: another run is meant",
}
