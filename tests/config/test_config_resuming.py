"""What a run can change when it is resumed: every key is on one side or the other."""

import pytest
import yaml

from rlcore.config import resuming
from rlcore.config.compose import check_resume, load, other_threads, recorded, to_yaml
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import keys, sections
from rlcore.errors import UserError
from rlcore.learner import specs as learner
from rlcore.learner.specs import DraftLearnerSpec
from rlcore.registry import load_object
from rlcore.rollout import specs as rollout

# Nothing of these reaches what a checkpoint holds: how rewards are made and graded
# (docs/rewards.md), what the learner makes of samples, pace, processes, records.
FREE_SECTIONS = (
    "task.rewards",
    "task.LABEL.rewards",
    "task.difficulty",
    "task.LABEL.difficulty",
    "algorithm",
    "cluster",
    "evaluation",
    "checkpoint",
    "logging",
)
GRADED = (
    "grade_timeout_s grader_processes grader_memory_mib max_prompt_tokens grade_weight grader_text"
)
PLAYED = "max_turns max_observation_tokens step_timeout_s episode_timeout_s concurrency memory_mib"
FREE = {
    "": "run_dir resume takeover_after_s bitwise",
    "model": "max_len gpu_check trust_remote_code warmup.cache_dir",
    "task": GRADED,
    "task.LABEL": f"{GRADED} weight samples_per_prompt max_new_tokens stop advantage",
    "task.LABEL.environment": PLAYED,
    "environment": PLAYED,
    "schedule": (
        "steps groups_per_step steps_per_publish steps_per_phase epochs max_staleness sampling "
        "max_uses on_publish on_collapse max_rollbacks colocated wait_data_timeout_s "
        "publish_timeout_s step_timeout_s wait_space_timeout_s"
    ),
    "critic": (
        "lr warmup_steps discount lam traces rho_cap c_cap clip whiten bootstrap lora.publish"
    ),
    "teacher": (
        "kind path paths actor refresh_steps context divergence js_weight top_k tail ratio_cap "
        "weight"
    ),
    "actor.LABEL": (
        "rounding activations scales keep_high_precision precise_layers kind engine count dtype "
        "num_cpus num_gpus tensor_parallel fp32_head max_num_seqs max_batched_tokens kv_cache_gib "
        "gpu_memory_utilization enforce_eager second_runner async_scheduling "
        "prefix_caching kv_on_update fp8_kv_cache logit_noise probability_floor temperature_scale "
        "price engine_args"
    ),
    "teacher.engine": (
        "count dtype num_cpus num_gpus tensor_parallel max_num_seqs kv_cache_gib "
        "gpu_memory_utilization timeout_s"
    ),
    "actor.LABEL.speculate": "path tokens",
    "actor.LABEL.target": "statistic moves value least most rate band",
    "actor.LABEL.share": "shape start end steps",
    "actor.LABEL.sparse": "block_size blocks share blocks_by_length length_step prompt "
    "prompt_block",
    # how many log-probs a record stores it says itself
    "rollout": "samples_per_prompt max_new_tokens stop logprobs_k request_timeout_s group_kinds",
    "correction": "none strata shadow shadow_every",
    "correction.tis": "cap floor level normalised adjusted widen_clip",
    "correction.mis": "low high level",
    "correction.icepop": "low high level",
    "correction.veto": "threshold",
    "correction.opsm": "delta target",
    "correction.m2po": "budget over",
    "correction.outliers": "threshold divergence over",
    "correction.clip_cov": "share low high",
    "correction.kl_cov": "share coef",
    "correction.minpro": "cap",
    "correction.vesp": "k_pos lam_pos k_neg lam_neg",
    "correction.dppo": "region divergence low high delta cap penalty",
    "correction.jackpot": ("mode target lam c1 c2 alpha_hat missing tail short_circuit normaliser"),
    "correction.vcpo": "rule base cap target",
    "correction.ais": "cap delta gamma beta eps alpha",
    "correction.dvp": "zero",
    "correction.rapid": "eta leave_one_out",
    # a state is stored by parameter and entry, in float32: any division of it reads it
    "learner": (
        "lr lr_warmup_steps lr_schedule lr_decay_steps lr_final betas eps weight_decay grad_clip "
        "ranks sequence_parallel tensor_parallel expert_parallel num_cpus num_gpus zero_stage "
        "dtype micro_batch_tokens layout share_prefix attention layers fp8 gradient_checkpointing "
        "head_chunk_tokens fp32_head fused_head overlap_comm ref_pass activation_cache_mib port "
        "offload_while_sampling max_threads train_sparse round_as step_bound engine_args"
    ),
    "learner.offload": "optimizer parameters nvme_path pin_memory",
    "learner.lora": "publish",
    "learner.distill": "kl kl_coef lr",
    "learner.distill.lora": "publish",
    "learner.draft": "ranks lr kl_coef kl_estimator",
}
FREE |= {f"actor.LABEL.{name}": keys for name, keys in FREE.items() if "correction" in name}
BASE = ("experiment=quickstart",)


def below(key, section):
    return key == section or key.startswith(f"{section}.")


def fixed(model=RunConfig, prefix=""):
    """The keys that specifications keep on resume; LABEL stands for a user's name."""
    for name, info in model.model_fields.items():
        inner = list(sections(info.annotation))
        if any(name in cls.__dict__.get("fixed", ()) for cls in model.__mro__):
            yield f"{prefix}{name}"
        for below, labelled in inner:
            yield from fixed(below, f"{prefix}{name}.LABEL." if labelled else f"{prefix}{name}.")


def engines_own():
    """(section, specification) of the settings that shipped engines declare themselves."""
    for specs, section in ((learner, "learner"), (rollout, "actor.LABEL")):
        for where in specs.ENGINE_FACTS.values():
            if (own := load_object(where).settings) is not None:
                yield f"{section}.engine_args.", own


def test_every_key_is_known_to_be_fixed_or_free_on_resume():
    kept = [*fixed(), *(key for section, own in engines_own() for key in fixed(own, section))]
    known = [*keys(), *(key for section, own in engines_own() for key in keys(own, section))]
    free = {f"{section}.{name}".lstrip(".") for section in FREE for name in FREE[section].split()}
    for key in known:
        sides = [
            any(below(key, pattern) for pattern in kept),
            key in free or any(below(key, section) for section in FREE_SECTIONS),
        ]
        assert sum(sides) == 1, f"{key}: name it in `fixed` of its specification or in FREE here"
    assert free <= {*known}, sorted(free - {*known})
    for pattern in (*kept, *FREE_SECTIONS):
        assert any(below(key, pattern) for key in known), f"{pattern} is no key any more"


def resumed(tmp_path, started, *words):
    (tmp_path / "config.yaml").write_text(to_yaml(load([f"run_dir={tmp_path}", *started])))
    config = load([f"run_dir={tmp_path}", "resume=auto", *words])
    check_resume(config)
    return config


TWO = ("task=[digits,arithmetic]", "model=tiny")


@pytest.mark.parametrize(
    ("started", "words", "new", "old"),
    [
        (BASE, ["seed=3"], "seed=3", "seed=0"),
        (BASE, ["task.args.max_digits=9"], "task.args.max_digits=9", "task.args.max_digits="),
        (BASE, ["task=arithmetic"], "task.name=arithmetic", "task.name=digits"),
        (BASE, ["rollout.temperature=0.5"], "rollout.temperature=0.5", "rollout.temperature=1.0"),
        (BASE, ["model.system_prompt=Hi"], "model.system_prompt=Hi", "model.system_prompt=null"),
        (BASE, ["model.chat_template=off"], "model.chat_template=off", "model.chat_template=auto"),
        (BASE, ["model.fresh.layers=2"], "model.fresh.layers=2", "model.fresh.layers=4"),
        (BASE, ["model.path=/m"], "model.path=/m", "model.path=null"),
        (BASE, ["learner=lora"], "learner.lora.rank=16", "learner.lora.rank=null"),
        (BASE, ["correction=dvp"], "correction.dvp.rho=", "correction.dvp.rho=null"),
        (BASE, ["environment=attempts"], "environment.name=attempts", "environment.name=null"),
        (
            (*BASE, "environment=attempts"),
            ["environment.args.attempts=4"],
            "environment.args.attempts=4",
            "environment.args.attempts=3",
        ),
        (
            TWO,
            ["task.arithmetic.args.ops='*'"],
            "task.arithmetic.args.ops=*",
            "task.arithmetic.args.ops=",
        ),
        (TWO, ["task.digits.temperature=0.5"], "task.digits.temperature=0.5", "=null"),
        (BASE, ["schedule=fixed_lag"], "schedule.lag=8", "schedule.lag=null"),
    ],
)
def test_what_would_make_the_rest_of_a_run_another_one_is_refused(
    tmp_path, started, words, new, old
):
    with pytest.raises(UserError) as refused:
        resumed(tmp_path, started, *words)
    sentence = str(refused.value)
    assert sentence.startswith(new) and old in sentence and str(tmp_path) in sentence


@pytest.mark.parametrize(
    ("started", "words"),
    [
        (BASE, []),
        (BASE, ["schedule.steps=99", "schedule=async", "learner.lr=1e-5", "learner.zero_stage=2"]),
        (BASE, ["rollout.max_new_tokens=24", "rollout.samples_per_prompt=4"]),
        (BASE, ["correction=tis", "algorithm=gspo"]),
        (BASE, ["actor=[bf16,fp8]"]),
        (TWO, ["task.digits.weight=3", "task.digits.samples_per_prompt=2"]),
        (("task=mbpp", "task.args.train_path=t", "model.path=/m"), ["task.args.timeout_s=7"]),
        # several instead of one: refused with the checkpoint's cursors, by the tasks' names
        (BASE, ["task=[digits,arithmetic]"]),
    ],
)
def test_what_leaves_the_rest_of_a_run_right_is_accepted(tmp_path, started, words):
    resumed(tmp_path, started, *words)


def test_a_correction_of_ones_own_says_what_it_keeps(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rlcore.corrections.specs import CorrectionSpec\n"
        "from rlcore.spec import setting\n\n\n"
        "class MySpec(CorrectionSpec):\n"
        "    method = 'rlcore.corrections.tis:Tis'\n"
        "    fixed = {'sampled': 'actors have drawn with it'}\n"
        "    sampled: float = setting(1.0, 'how')\n"
        "    cap: float = setting(2.0, 'most')\n"
    )
    own = [*BASE, f"+correction.mine.name='{tmp_path}/mine.py:MySpec'"]
    resumed(tmp_path, own, *own, "+correction.mine.cap=3")
    with pytest.raises(UserError, match=r"^correction\.mine\.sampled=2.0 .*: actors have drawn"):
        resumed(tmp_path, own, *own, "+correction.mine.sampled=2")


def test_a_draft_that_learns_can_be_neither_added_nor_dropped(tmp_path):
    before = load([f"run_dir={tmp_path}", *BASE])
    now = before.model_copy(
        update={"learner": before.learner.model_copy(update={"draft": DraftLearnerSpec()})}
    )
    for one, other in ((before, now), (now, before)):
        with pytest.raises(UserError, match=r"^learner\.draft="):
            resuming.check_resume(one, other)
    resuming.check_resume(now, now)


def test_other_threads_of_a_synchronous_run_are_named(tmp_path):
    begun = ["schedule=on_policy", "learner.max_threads=2"]
    for words, said in (
        ([], None),
        (["learner.lr=1e-5"], None),
        (["learner.max_threads=4"], "learner.max_threads=4 (begun with 2): sums round otherwise"),
        (["actor.bf16.num_cpus=2"], "actor.bf16.num_cpus=2.0 (begun with 1.0)"),
        (["cluster.cpu_fast_paths=false"], "cluster.cpu_fast_paths=false (begun with true)"),
    ):
        found = other_threads(resumed(tmp_path, [*BASE, *begun], *words))
        assert (found or "").startswith(said or "") and bool(found) == bool(said)
    assert other_threads(resumed(tmp_path, BASE, "learner.max_threads=4")) is None  # asynchronous


def test_a_run_directory_that_moved_goes_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(to_yaml(load([f"run_dir={tmp_path}/a", *BASE])))
    (tmp_path / "a").rename(tmp_path / "b")
    check_resume(load([f"run_dir={tmp_path}/b", "resume=auto"]))


@pytest.mark.parametrize("paths", [(True, True), (True, False)])
def test_a_run_of_version_0_2_is_read_and_goes_on(tmp_path, paths):
    words = [f"run_dir={tmp_path}", *BASE, "actor=[bf16,fp8]"]
    saved = yaml.safe_load(to_yaml(load(words)))
    del saved["cluster"]["cpu_fast_paths"]
    for actor, own in zip(saved["actor"].values(), paths, strict=True):
        actor["cpu_fast_path"] = own
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    config = load([f"run_dir={tmp_path}", "resume=auto"])
    check_resume(config)
    assert (
        config.cluster.cpu_fast_paths == recorded(tmp_path)["cluster.cpu_fast_paths"] == all(paths)
    )
