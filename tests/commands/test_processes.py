"""Keys reach the roles that they govern."""

from types import SimpleNamespace

import pytest

from rlcore import cores as machine
from rlcore.buffer.specs import TaskShare
from rlcore.commands import derived, processes
from rlcore.config.compose import load
from rlcore.corrections.tis import TisSpec
from rlcore.errors import UserError
from rlcore.weights.specs import RoundingSpec


def run(*words):
    return load(["run_dir=runs/x", *words])


def described(*words):
    config = run(*words)
    ((label, actor),) = config.actor.items()
    return derived.describe_actor(label, actor, config.model.max_len)


def test_a_graders_limits_are_those_of_its_task():
    config = run("task.grade_timeout_s=3", "task.grader_memory_mib=512", "task.grader_processes=2")
    (pool,) = derived.grader_pools(config)
    grading = pool.grading
    limits = (grading.grade_timeout_s, grading.grader_memory_mib, grading.grader_processes)
    assert limits == (3.0, 512, 2)


def test_graders_know_every_task_by_its_label():
    config = run("task@evaluation.tasks.sums=arithmetic")
    (pool,) = derived.grader_pools(config)
    assert {label: task.name for label, task in pool.tasks.items()} == {
        "digits": "digits",
        "sums": "arithmetic",
    }
    assert pool.keys == {"digits": "task", "sums": "evaluation.tasks.sums"}


def test_each_of_several_tasks_has_graders_and_group_size_and_stop_strings_of_its_own():
    config = run(
        *("task=[digits,arithmetic]", "task@evaluation.tasks.more=countdown"),
        *("task.digits.grade_timeout_s=3", "task.arithmetic.grader_processes=2"),
        *("task.digits.samples_per_prompt=4", "task.digits.weight=3", "task.digits.stop=[x]"),
        *("rollout.stop=[y]", "task.arithmetic.max_new_tokens=70"),
    )
    first, second = derived.grader_pools(config)
    assert (list(first.tasks), first.grading.grade_timeout_s) == (["digits", "more"], 3.0)
    assert (list(second.tasks), second.grading.grader_processes) == (["arithmetic"], 2)
    assert processes.task_shares(config) == {
        "digits": TaskShare(4, 3.0),
        "arithmetic": TaskShare(8, 1.0),
    }
    stop = derived.stop_strings(config)
    found = [stop.of(f"{label}/heldout/0") for label in ("digits", "arithmetic", "more")]
    assert found == [("x",), ("y",), ("y",)]
    # a constant that the learner may divide by: the longest response of any task
    assert processes.policy_job(config, "model", 0).sampling.max_new_tokens == 70


@pytest.mark.parametrize(
    ("words", "threads", "follows"),
    [
        ((), None, False),
        (("learner.ranks=2", "learner.max_threads=4"), None, True),
        (("learner.max_threads=4",), None, True),
        (("learner.max_threads=null",), None, False),
        (("schedule=fixed_lag", "schedule.lag=2"), None, False),
        (("learner.ranks=2", "learner.tensor_parallel=2"), None, False),
        (("schedule=on_policy",), 8, False),
        (("schedule=large_batch", "learner.ranks=3"), 2, False),
        (("schedule=on_policy", "learner.max_threads=3"), 3, False),
        (("schedule=on_policy", "learner.max_threads=null"), None, False),
        (("schedule=on_policy", "learner.num_cpus=8"), None, False),
        (("schedule=on_policy", "cluster.address=head:6379"), None, False),  # of other machines
        (("schedule=on_policy", "bitwise=true", "correction=none"), None, False),
        (("learner=gpu",), None, False),
    ],
)
def test_compute_threads_follow_the_load_or_are_a_number_that_is_kept(
    words, threads, follows, monkeypatch
):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = derived.with_stated_threads(run(*words))
    job = processes.policy_job(config, "model", 0)
    assert (job.threads, derived.follows_load(config), job.follows_load) == (
        threads,
        follows,
        False,
    )
    assert config.learner.max_threads in ((4,) if follows else (threads,))
    cluster = config.cluster.model_copy(update={"cpu_fast_paths": False})
    assert not derived.follows_load(config.model_copy(update={"cluster": cluster}))
    assert derived.with_stated_threads(config) == config  # as a resumed run is composed
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    bounded = derived.with_stated_threads(run(*words)).learner.max_threads
    assert bounded == (2 if threads == 8 else None if threads == 2 else config.learner.max_threads)


@pytest.mark.parametrize(
    ("words", "behind"),
    [
        (("schedule=on_policy",), 0),
        (("schedule=async", "schedule.max_staleness=4"), 4),
        (("schedule=fixed_lag", "schedule.lag=3"), 3),
        # a phase begins with fresh samples, and its later steps are no lateness of theirs
        (("schedule=on_policy", "schedule.steps_per_phase=2", "schedule.epochs=2"), 0),
        (("schedule=async", "schedule.max_staleness=4", "schedule.steps_per_phase=4"), 4),
        # samples wait for a publication
        (("schedule=on_policy", "schedule.steps_per_publish=4", "schedule.steps_per_phase=1"), 3),
        (("schedule=async", "schedule.max_staleness=2", "schedule.steps_per_publish=3"), 4),
    ],
)
def test_the_learner_knows_how_late_samples_may_be_as_their_phase_begins(words, behind):
    assert processes.policy_job(run(*words), "model", 0).in_flight == behind


def test_weights_are_rounded_and_exported_as_one_actor_serves_them():
    two = "actor=[fp8,bf16]", "actor.fp8.rounding=int4", "actor.fp8.precise_layers=1"
    config = run(*two, "learner.round_as=fp8")
    rounding = processes.policy_job(config, "model", 0).rounding
    assert rounding == RoundingSpec(rounding="int4", precise_layers=1)
    assert derived.served_rounding(config, "format=rounded") == rounding
    assert derived.served_rounding(run(*two), "format=rounded") == rounding  # the only one
    assert processes.policy_job(run(*two), "model", 0).rounding is None
    with pytest.raises(UserError, match=r"format=rounded writes .* none that rounds"):
        derived.served_rounding(run(), "format=rounded")
    with pytest.raises(UserError, match="several that round"):
        derived.served_rounding(run(*two, "actor.bf16.rounding=int8"), "format=rounded")


def test_a_sparse_actor_whose_budget_covers_every_context_is_said_to_be_dense():
    # By default it is sparse on the default model.
    assert "NOTHING IS SPARSE" not in described("actor=sparse")
    dense = described("actor=sparse", "actor.sparse.sparse.blocks=8")
    assert "model.max_len=128: NOTHING IS SPARSE" in dense
    assert "NOTHING" not in described("actor=sparse", "actor.sparse.sparse.blocks=7")
    by_length = "actor.sparse.sparse={blocks: null, blocks_by_length: [3, %s], length_step: 64}"
    assert ", 3 to 5 pages by position of" in described("actor=sparse", by_length % 5)
    assert ", 3 pages of" in described("actor=sparse", by_length % 3)


def test_an_fp8_cache_goes_with_bf16_weights_too():
    gpu = ("actor.bf16.num_gpus=1", "actor.bf16.fp8_kv_cache=true")
    config = run(*gpu)
    engine = processes.engine_job(config, "bf16", config.actor["bf16"], "model")
    assert engine.actor.fp8_kv_cache and not engine.actor.quantised_by_engine
    assert described(*gpu).endswith("the policy in bfloat16, FP8 KV cache")


def test_what_a_run_needs_counts_every_role():
    assert derived.needed(run()) == (2.0, 0.0)
    fleet = ("actor=[bf16,fp8]", "actor.bf16.count=2", "evaluation.dense_actor=true")
    assert derived.needed(run(*fleet)) == (5.0, 0.0)
    assert derived.needed(run(*fleet), actors=False) == (1.0, 0.0)
    gpus = run("actor.bf16.num_gpus=1", "actor.bf16.tensor_parallel=2", "learner=gpu")
    assert derived.needed(gpus) == (2.0, 3.0)
    assert derived.needed(gpus, learner=False) == (1.0, 2.0)
    shares = ("learner=gpu", "learner.num_gpus=0.4", "actor.bf16.num_gpus=0.4")
    pairs = run(*shares, "learner.ranks=2", "actor.bf16.count=2", "cluster.transport=ipc")
    assert derived.needed(pairs) == (4.0, 2.0)  # each pair has a GPU of its own
    assert derived.needed(pairs, learner=False) == (2.0, 0.8)


def test_who_loads_which_weights():
    def weights(*words):
        config = run(*words)
        return {label: derived.actor_weights(config, a) for label, a in config.actor.items()}

    assert weights("actor=[bf16,fp8]") == {"bf16": "policy", "fp8": "policy"}
    assert weights("actor=sparse") == {"sparse": "policy"}
    assert weights("experiment=distill_sparse") == {"sparse": "sparse"}
    assert weights("experiment=draft_frozen") == {"draft": None}
    assert weights("experiment=draft_cotrain") == {"draft": "draft"}


def test_weights_travel_as_the_actors_serve_them():
    assert derived.wire_dtype(run()) == "float32"
    assert derived.wire_dtype(run("actor.bf16.num_gpus=1")) == "bfloat16"
    assert derived.wire_dtype(run("actor=[bf16,fp8]", "actor.bf16.dtype=bfloat16")) == "float32"


def test_a_cotrained_draft_has_a_learner_of_its_own():
    config = run("experiment=draft_cotrain", "learner.draft.lr=3e-4", "algorithm.kl_coef=0.5")
    actor = config.actor["draft"].model_copy(update={"draft_path": "draft", "draft_fresh": None})
    config = config.model_copy(update={"actor": {"draft": actor}})
    jobs = processes.learner_jobs(config, "policy", 0)
    assert list(jobs) == ["policy", "draft"]
    policy, draft = jobs.values()
    assert (policy.model_path, draft.model_path, draft.frozen_path) == ("policy", "draft", "policy")
    assert (policy.objective.kl_coef, draft.objective.kl_coef) == (0.5, 0.1)
    assert draft.learner.lr == 3e-4 and draft.learner.draft is None
    assert draft.corrections == {"tis": TisSpec()}
    assert "jackpot" in policy.corrections


def test_the_learner_attends_by_the_actors_rule_only_where_it_must():
    def rule(*words):
        return processes.policy_job(run(*words), "model", 0).sparse

    assert rule("actor=sparse") is None
    assert rule("actor=sparse", "learner.train_sparse=true").blocks == 4
    assert rule("experiment=distill_sparse").blocks == 4


def test_a_clip_that_cannot_bind_is_said_with_the_keys_to_change():
    sentence = derived.idle_clip(run("algorithm.eps_high=0.28", "schedule=async"))
    assert sentence is not None
    for part in ("algorithm.loss=ppo", "schedule.steps_per_phase", "schedule.epochs"):
        assert part in sentence
    assert "algorithm.loss=gspo" in (derived.idle_clip(run("algorithm=gspo")) or "")
    assert "algorithm.loss=cispo" in (derived.idle_clip(run("algorithm=cispo")) or "")


@pytest.mark.parametrize(
    "words",
    [
        ("schedule.epochs=2",),
        ("algorithm.ratio_to=p_inf", "correction=none", "algorithm.eps_high=0.28"),
        ("schedule.steps_per_phase=2",),
        ("schedule=large_batch",),
        ("algorithm=rloo",),
        ("correction.tis.adjusted=true",),
    ],
)
def test_nothing_is_said_of_a_clip_that_can_bind_or_is_not_there(words):
    assert derived.idle_clip(run(*words)) is None


@pytest.mark.parametrize("lost", [True, False])
def test_no_process_of_a_cluster_without_a_head_is_waited_for(lost, monkeypatch):
    """Its graders would not answer, and Ray ends a driver that stays for a minute."""
    ended = []
    graders = SimpleNamespace(close=lambda: ended.append("closed"), kill=lambda: None)
    buffer = SimpleNamespace(kill=lambda: ended.append("killed"))
    session = processes.Session.__new__(processes.Session)
    session._config = run("cluster.address=head:6379")
    session.scorer, session.buffer = graders, buffer
    session.beside = session.fleet = session.learner = session.shards = session.teacher = None
    monkeypatch.setattr(processes, "joined_head_lost", lambda address: lost)
    session.close()
    assert ended == ([] if lost else ["closed", "killed"])
