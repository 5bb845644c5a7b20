"""What is refused, and what is made, before any process is started: plain calls of `prepare`."""

import json
import math
from pathlib import Path

import pytest

import rlcore
from rlcore.cli import main
from rlcore.commands import processes
from rlcore.commands.model_checks import check_patches, check_replay
from rlcore.commands.preflight import prepare
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer, build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.serialization import record_bytes

ALPHABET = "0123456789= "
LENGTHS = ("model.max_len=64", "rollout.max_new_tokens=32")
SHAPE = FreshModelSpec(
    hidden_size=32, layers=1, heads=4, kv_heads=2, head_dim=32, intermediate_size=32
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return _made(tmp_path_factory.mktemp("models") / "policy")


def _made(folder, alphabet=ALPHABET, **other):
    return build_fresh_model(folder, alphabet, SHAPE.model_copy(update=other), seed=0, max_len=64)


def prepared(model, *words, **how):
    base = ["run_dir=x", "model=path", f"model.path={model}", *LENGTHS, "rollout.logprobs_k=4"]
    return prepare(load([*base, *words]), **how)


NOTHING = """
class Nothing:
    def reset(self, item, seed): ...
    def step(self, action): ...
    def grade(self): ...
"""


@pytest.mark.parametrize("turns, said", [(1, False), (2, True)])
def test_a_length_that_does_not_hold_all_turns_is_said_before_a_run(model, tmp_path, turns, said):
    (tmp_path / "mine.py").write_text(NOTHING)
    words = [f"environment={tmp_path}/mine.py:Nothing", f"environment.max_turns={turns}"]
    sentence = "model.max_len=64 does not hold environment.max_turns=2 turns of rollout.max_new"
    remarks = prepared(model, "task=digits", *words).remarks
    assert any(sentence in line for line in remarks) == said, remarks


TURNS = "schedule=on_policy schedule.colocated=true"
KV, ACTIVATIONS = "actor.bf16.kv_on_update=recompute", "actor.bf16.activations=none"
TWO_KINDS = ("actor=[bf16,fp8]", "actor.fp8.rounding=int3")


@pytest.mark.parametrize(
    "words, said",
    [
        (TWO_KINDS, True),
        ((*TWO_KINDS, "evaluation.dense_actor=true"), False),
        (("actor=[fp8]", *TWO_KINDS[1:]), False),  # one kind, whose answers the figure is of
        (("actor=[bf16]",), False),
    ],
)
def test_an_evaluation_that_mixes_policies_is_said_before_a_run(model, words, said):
    remarks = prepared(model, "task=digits", *words).remarks
    sentence = "actor.fp8 sample from another policy: eval/* mixes them"
    assert any(sentence in line for line in remarks) == said, remarks


@pytest.mark.parametrize(
    "words, said",
    [
        (("correction=[dvp]", "actor.bf16.probability_floor=1.5e-6"), True),
        (("correction=[dvp]", "actor.bf16.probability_floor=1e-7"), False),
        (("correction=[tis]", "actor.bf16.probability_floor=1.5e-6"), False),
    ],
)
def test_a_safe_set_that_begins_near_a_floor_is_said_before_a_run(model, words, said):
    remarks = prepared(model, "task=digits", *words).remarks
    sentence = "probability_floor=1.5e-06 is above a tenth of correction.dvp.rho=2.26033e-06"
    assert any(sentence in line for line in remarks) == said, remarks


def test_a_model_whose_tokenizer_has_no_pad_token_has_a_padding(tmp_path):
    folder = _made(tmp_path / "unpadded")
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    made = prepared(folder)
    assert made.tokenizer.pad_token_id is None
    assert made.pad_id == made.tokenizer.eos_token_id


def test_more_log_probs_than_tokens_are_all_of_them(model, capsys):
    size = len(build_char_tokenizer(ALPHABET))
    asked = prepared(model, "rollout.logprobs_k=999")
    said = f"rollout.logprobs_k=999 is above the model's vocabulary of {size} tokens"
    assert capsys.readouterr().out.splitlines() == [f"{said}, and is taken as {size}"]
    assert asked.config.rollout.logprobs_k == size
    (first, *_) = asked.requests.group(0, "digits/train/0")
    assert first.sampling.logprobs_k == size
    engine = processes.engine_job(asked.config, "bf16", asked.config.actor["bf16"], str(model))
    assert engine.logprobs_k == size
    assert processes.policy_job(asked.config, str(model), 0).sampling.logprobs_k == size
    whole = prepared(model, f"rollout.logprobs_k={size}")
    assert whole.config.rollout.logprobs_k == size and not capsys.readouterr().out


def test_a_warm_up_needs_an_end_of_sequence(tmp_path, capsys):
    folder = _made(tmp_path / "endless")
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    words = ["model=path", f"model.path={folder}", f"run_dir={tmp_path / 'run'}", *LENGTHS]
    assert main(["sft", *words]) == 2
    *_, sentence = capsys.readouterr().err.strip().splitlines()
    assert f"model.path={folder} has a tokenizer without an end of sequence" in sentence
    assert not (tmp_path / "run").exists()


def test_nobody_asks_the_tokenizer_for_its_pad_token_directly():
    """It may be None, which only shows in the first micro-batch."""
    sources = Path(rlcore.__file__).parent.rglob("*.py")
    users = {p.name for p in sources if "tokenizer.pad_token_id" in p.read_text()}
    # what replaces a missing one, and what makes models of one
    assert users == {"text.py", "fresh.py", "llada.py"}


def _file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 2", "answer": "#### 3"}\n')
    return rows


def _splits(rows, *, train=True, heldout=True):
    named = [f"task.args.train_path={rows if train else 'null'}"]
    return ["task=gsm8k", *named, *([f"task.args.heldout_path={rows}"] if heldout else [])]


OFF = ("evaluation.every=0", "evaluation.at_start=false")


@pytest.mark.parametrize(
    ("splits", "words", "how", "said"),
    [
        ({"train": False}, (), {}, ["task.name=gsm8k", "to train on", "task.args.train_path"]),
        ({"train": False}, (), {"evaluates": False}, ["task.name=gsm8k", "to train on"]),
        ({"heldout": False}, (), {}, ["task.name=gsm8k", "task.args.heldout_path", *OFF]),
        ({"heldout": False}, OFF[:1], {}, ["task.args.heldout_path"]),
        ({"heldout": False}, OFF[1:], {}, ["task.args.heldout_path"]),
        ({"heldout": False}, OFF, {"trains": False}, ["task.args.heldout_path"]),
    ],
)
def test_an_empty_split_that_would_be_read_is_refused(model, tmp_path, splits, words, how, said):
    with pytest.raises(UserError) as caught:
        prepared(model, *_splits(_file(tmp_path), **splits), *words, **how)
    assert not [part for part in said if part not in str(caught.value)], caught.value


def test_an_empty_split_that_nobody_reads_is_not_asked_for(model, tmp_path):
    rows = _file(tmp_path)
    assert prepared(model, *_splits(rows, heldout=False), *OFF).heldout.sources == {}
    evaluated = prepared(model, *_splits(rows, train=False), trains=False)
    assert list(evaluated.heldout.sources) == ["gsm8k"]
    prepared(model, *_splits(rows, heldout=False), evaluates=False)


def test_an_evaluation_task_is_refused_under_its_own_key(model, tmp_path):
    extra = f"evaluation.tasks.more={{name: gsm8k, args: {{train_path: {_file(tmp_path)}}}}}"
    with pytest.raises(UserError, match=r"evaluation\.tasks\.more\.args\.heldout_path"):
        prepared(model, extra)
    with pytest.raises(UserError, match=r"evaluation\.tasks\.more\.args\.digits"):
        prepared(model, "evaluation.tasks.more={name: arithmetic, args: {digits: 3}}")


def _draft(tmp_path, alphabet=ALPHABET, **other):
    return _made(tmp_path / "draft", alphabet, **other)


def _drafted(model, draft, *words):
    return prepared(model, "actor=draft", f"actor.draft.draft_path={draft}", *words)


def test_a_draft_that_fits_is_accepted(model, tmp_path):
    _drafted(model, _draft(tmp_path))


def test_a_draft_of_another_vocabulary_is_refused(model, tmp_path):
    with pytest.raises(
        UserError, match=r"actor\.draft\.draft_path=.*1 entries of their tokenizers differ"
    ):
        _drafted(model, _draft(tmp_path, ALPHABET + "x"))


def test_a_draft_of_another_width_is_refused(model, tmp_path):
    with pytest.raises(
        UserError, match=r"actor\.draft\.draft_path=.*vocab_size is 40, the policy's 15"
    ):
        _drafted(model, _draft(tmp_path, vocab_size=40))


def test_a_proposing_model_must_have_the_policy_s_vocabulary(model, tmp_path):
    word = "actor.bf16.speculate={{path: {}}}"
    fits, other = _made(tmp_path / "fits", ALPHABET), _made(tmp_path / "other", ALPHABET + "x")
    prepared(model, word.format(fits))
    with pytest.raises(UserError, match=r"^actor\.bf16\.speculate\.path=.*tokens that it proposes"):
        prepared(model, word.format(other))


def test_a_draft_of_another_end_of_sequence_is_refused(model, tmp_path):
    draft = _draft(tmp_path)
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.eos_token = "<unk>"
    tokenizer.save_pretrained(draft)
    with pytest.raises(
        UserError, match=r"actor\.draft\.draft_path=.*end of sequence is <unk>, the policy's <eos>"
    ):
        _drafted(model, draft)


def test_a_draft_is_compared_with_a_policy_that_is_yet_to_be_made(tmp_path):
    draft = f"actor.draft.draft_path={_draft(tmp_path)}"
    with pytest.raises(UserError, match=r"actor\.draft\.draft_path=.*differ.*ratios"):
        prepare(load(["run_dir=x", "actor=draft", draft, *LENGTHS]))
    with pytest.raises(UserError, match=r"actor\.draft\.draft_fresh\.vocab_size=40 .* 64"):
        prepare(
            load(["run_dir=x", "experiment=draft_frozen", "actor.draft.draft_fresh.vocab_size=40"])
        )


@pytest.mark.parametrize("missing", ["", "tokenizer.json", "config.json", "model.safetensors"])
def test_a_draft_without_a_part_is_named_by_its_own_key(model, tmp_path, missing):
    draft = _draft(tmp_path)
    if missing:
        (draft / missing).unlink()
        (draft / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"^actor\.draft\.draft_path="):
        _drafted(model, draft if missing else tmp_path / "none")


def test_weights_in_another_format_are_refused(tmp_path):
    folder = _made(tmp_path / "old")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.path=.*old holds no \.safetensors file"):
        prepared(folder)


def test_a_masked_diffusion_model_is_no_draft(model, tmp_path):
    folder = _made(tmp_path / "masked")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llada"}))
    with pytest.raises(UserError, match=r"^actor\.draft\.draft_path=.*masked-diffusion"):
        _drafted(model, folder)


def test_a_mixture_of_experts_is_refused(model, tmp_path):
    folder = _made(tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    with pytest.raises(UserError, match=r"^model\.path=.*mixture of experts \(num_experts=8\)"):
        prepared(folder)
    with pytest.raises(UserError, match=r"^actor\.draft\.draft_path=.*mixture of experts"):
        _drafted(model, folder)


@pytest.mark.parametrize(
    ("words", "setting", "remedy"),
    [
        ("learner=zero3", "learner.zero_stage=3", "learner.zero_stage=2"),
        ("learner.fp8=row", "learner.fp8=row", "learner.fp8=none"),
        (
            "learner.ranks=2 learner.sequence_parallel=2",
            "learner.sequence_parallel=2",
            "learner.sequence_parallel=1",
        ),
        (
            "learner.lora={publish: adapter}",
            "learner.lora.publish=adapter",
            "learner.lora.publish=merged",
        ),
        (TURNS, "schedule.colocated=true", "schedule.colocated=false"),
        (
            "learner.activation_cache_mib=64",
            "learner.activation_cache_mib=64",
            "learner.activation_cache_mib=0",
        ),
        ("actor.bf16.dtype=bfloat16", "actor.bf16.dtype=bfloat16", "actor.bf16.dtype=float32"),
        ("actor.bf16.kv_on_update=keep", "actor.bf16.kv_on_update=keep", KV),
        ("actor.bf16.activations=int8", "actor.bf16.activations=int8", ACTIVATIONS),
    ],
)
def test_what_was_not_shown_with_recurrent_layers_is_refused(tmp_path, words, setting, remedy):
    hybrid = _made(tmp_path / "hybrid")
    file = hybrid / "config.json"
    made = json.loads(file.read_text()) | {"model_type": "lfm2", "full_attn_idxs": [0]}
    file.write_text(json.dumps(made))
    given = words.split(" ") if "{" not in words else [words]
    with pytest.raises(UserError, match=rf"{setting} is not proven with recurrent layers"):
        prepared(hybrid, *given)
    prepared(hybrid, *given, remedy)


def test_weights_that_vllm_derives_others_from_are_not_patched(model):
    config = load(["experiment=quickstart", "run_dir=x", "cluster.full_weights_every=8"])
    from_gpu = config.cluster.model_copy(update={"transport": "nccl"})
    own = json.loads((model / "config.json").read_text())
    latent = own | {"kv_lora_rank": 256}
    check_patches(config, latent)
    patched = config.model_copy(update={"cluster": from_gpu})
    check_patches(patched, own)
    with pytest.raises(UserError, match=r"^cluster\.full_weights_every=8 .*kv_lora_rank=256"):
        check_patches(patched, latent)


def test_a_buffer_too_small_for_one_step_is_refused(model):
    with pytest.raises(UserError, match=r"cluster\.buffer_mib=1 .*schedule\.groups_per_step=64"):
        prepared(model, "cluster.buffer_mib=1", "rollout.samples_per_prompt=32")


def test_the_first_groups_are_expected_at_full_length_with_the_experts_of_their_tokens(tmp_path):
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
    experts |= {"vocab_size": 16, "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    words = ["run_dir=x", "model=path", f"model.path={tmp_path}", "model.max_len=60000"]
    words += ["rollout.max_new_tokens=50000", "rollout.logprobs_k=20", "schedule.max_staleness=99"]
    words += ["rollout.samples_per_prompt=4", "schedule.groups_per_step=4"]
    words += ["cluster.buffer_mib=4096"]
    plain = record_bytes(60000, 50000, 20)
    for replayed, longest in (("false", plain), ("true", plain + 60000 * 48 * 8)):
        buffer = processes.replay_buffer(load([*words, f"learner.router_replay={replayed}"]))
        assert buffer.room() == (4096 << 20) // (4 * longest) > 20


def test_settings_beyond_the_model_are_refused(model):
    with pytest.raises(
        UserError, match=r"model\.max_len=65 is beyond the 64 positions of model\.path="
    ):
        prepared(model, "model.max_len=65")
    with pytest.raises(
        UserError,
        match=r"actor\.bf16\.tensor_parallel=3 does not divide the model's 4 attention",
    ):
        prepared(model, "actor.bf16.tensor_parallel=3")
    prepared(model, "actor.bf16.tensor_parallel=2")


def test_under_dvp_the_actors_keep_to_the_learner_s_safe_set(tmp_path):
    words = ["experiment=quickstart", f"run_dir={tmp_path}", "correction=[dvp]"]
    requests = prepare(load(words)).requests.group(0, "digits/train/0")
    assert requests and all(r.sampling.min_p == math.exp(-13.0) for r in requests)
    looser = prepare(load([*words, "correction.dvp.rho=0.01"])).requests
    assert looser.asked("digits/train/0").sampling.min_p == 0.01


def test_each_of_several_tasks_is_asked_for_in_its_own_way(tmp_path):
    words = ["experiment=quickstart", f"run_dir={tmp_path}", "task=[digits,arithmetic]"]
    own = ["task.arithmetic.samples_per_prompt=3", "task.arithmetic.max_new_tokens=9"]
    found = prepare(load([*words, *own, "task.arithmetic.stop=['.']", "task.digits.weight=0"]))
    assert {item.prompt_id.split("/")[0] for item in found.prompts.peek(8)} == {"arithmetic"}
    (sums, *_), digits = (
        found.requests.group(i, f"{label}/train/0")
        for i, label in enumerate(("arithmetic", "digits"))
    )
    assert len(found.requests.group(0, "arithmetic/train/0")) == 3 and len(digits) == 8
    assert (sums.sampling.max_new_tokens, sums.sampling.stop) == (9, (".",))
    assert digits[0].sampling.max_new_tokens == 16
    assert found.heldout.sampling("arithmetic").max_new_tokens == 9
    assert found.tokenizer.encode("12+34=56")  # the alphabet of both


def test_pass_rates_are_remembered_of_finite_tasks_alone(tmp_path):
    words = ["experiment=quickstart", f"run_dir={tmp_path}"]
    endless = r"task\.difficulty remembers problems, and task\.name=digits makes .*problems=N"
    with pytest.raises(UserError, match=endless):
        prepare(load([*words, "task.difficulty={}"]))
    config = load([*words, "task.difficulty.problems=20"])
    found = prepare(config)
    assert found.prompts.remembers and processes.task_shares(config)["digits"].remember
    numbers = [item.prompt_id for item in found.prompts.peek(40)]
    assert sorted(numbers[:20]) == sorted(numbers[20:]) and len({*numbers}) == 20


def test_each_of_several_tasks_must_have_what_a_single_one_must(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "q", "answer": "#### 1"}) + "\n")
    gsm8k = ["task=[digits,gsm8k]", "model.max_len=64", "rollout.max_new_tokens=32"]
    with pytest.raises(UserError, match=r"task\.gsm8k\.name=gsm8k has no problems to train on"):
        prepared(model, *gsm8k, f"task.gsm8k.args={{train_path: null, heldout_path: {rows}}}")
    with pytest.raises(UserError, match=r"task\.gsm8k\.name=gsm8k has no held-out problems"):
        prepared(model, *gsm8k, f"task.gsm8k.args.train_path={rows}")
    with pytest.raises(UserError, match=r"task\.digits\.args\.op=turn"):
        prepared(model, "task=[digits]", "task.digits.args.op=turn")
    with pytest.raises(UserError, match=r"task\.gsm8k\.name=gsm8k: a fresh model's"):
        prepare(load([f"run_dir={tmp_path}", *gsm8k, f"task.gsm8k.args.train_path={rows}"]))


@pytest.mark.processes
def test_a_program_must_end_before_its_grading_does(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"text": "1", "code": "def f():\n    return 1", "test_list": ["assert f() == 1"]}
    rows.write_text(json.dumps(row) + "\n")
    words = [
        "task=mbpp",
        f"task.args.train_path={rows}",
        f"task.args.heldout_path={rows}",
        f"+task.args.proof_cache={tmp_path}",
        "model.max_len=64",
    ]
    said = r"task\.args\.timeout_s=5 is not below task\.grade_timeout_s=5"
    with pytest.raises(UserError, match=said):
        prepared(model, *words, "task.grade_timeout_s=5")
    extra = f"evaluation.tasks.more={{name: mbpp, args: {{heldout_path: {rows}, timeout_s: 20}}}}"
    with pytest.raises(
        UserError, match=r"evaluation\.tasks\.more\.args\.timeout_s=20 .*grade_timeout_s=10"
    ):
        prepared(model, extra)


def test_experts_are_replayed_where_an_engine_chose_some(model, tmp_path):
    with pytest.raises(
        UserError, match=r"^learner\.router_replay=true .* has one expert for every"
    ):
        prepared(model, "learner.router_replay=true")
    folder = _made(tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    changes = {"num_experts": 8, "num_experts_per_tok": 2, "model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(config | changes))
    prepared(folder, "learner.router_replay=true")
    other = load(["experiment=quickstart", "learner.router_replay=true", f"run_dir={tmp_path}"])
    engine = "rlcore.interfaces:RolloutEngine"
    own = {"bf16": other.actor["bf16"].model_copy(update={"engine": engine})}
    with pytest.raises(
        UserError, match=r"^learner\.router_replay=true .*actor\.bf16\.engine=rlcore"
    ):
        check_replay(other.model_copy(update={"actor": own}), config | changes)
    prepared(folder, "actor.bf16.tensor_parallel=2")
    with pytest.raises(UserError, match=r"actor\.bf16\.tensor_parallel=2 has several: use 1"):
        prepared(folder, "learner.router_replay=true", "actor.bf16.tensor_parallel=2")
    words = ["learner.router_replay=true", "actor.bf16.num_gpus=1", "learner=gpu"]
    with pytest.raises(UserError, match=r"actor\.bf16\.second_runner=False with"):
        prepared(folder, *words, "actor.bf16.second_runner=false")
    with pytest.raises(UserError, match=r"leave actor\.bf16\.prefix_caching=true"):
        prepared(folder, *words, "actor.bf16.prefix_caching=false")
    diffusion = ["experiment=diffusion", "learner.router_replay=true", f"run_dir={tmp_path}"]
    with pytest.raises(UserError, match=r"^learner\.router_replay=true is made for causal actors"):
        prepare(load(diffusion))


OWN_GRADER = """
def grade(item, response, tokens):
    return [0.0 for _ in tokens]


def whole(item, response):
    return 0.0
"""


@pytest.mark.parametrize("name", ["attempts", "task"])
def test_a_grader_that_asks_for_tokens_is_refused_where_it_would_get_none(model, tmp_path, name):
    (tmp_path / "graders.py").write_text(OWN_GRADER)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1", "answer": "1"}) + "\n")
    files = [f"task.args.{split}_path={rows}" for split in ("train", "heldout")]
    words = ["task=file", "task.args.question_field=question", *files]
    asking = [*words, f"task.args.grader={tmp_path}/graders.py:grade"]
    prepared(model, *asking)
    with pytest.raises(UserError, match=rf"environment\.name={name} .* task\.name=file asks for"):
        prepared(model, *asking, f"environment={name}")
    prepared(model, *words, f"task.args.grader={tmp_path}/graders.py:whole", f"environment={name}")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["task=json:loads"], ["task.name=json:loads", "is not a class", "rlcore.interfaces.Task"]),
        (["task=json:JSONDecoder"], ["task.name=json:JSONDecoder", "lacks", "grade"]),
        (["actor.bf16.engine=json:loads"], ["actor.bf16.engine=json:loads", "RolloutEngine"]),
        (["environment=openenv", "environment.args.url=5"], ["environment.args", "url", "5"]),
        (["environment=attempts", "environment.args.cost=x"], ["environment.args", "cost"]),
        (["model.path=null", "model.fresh.vocab_size=2"], ["model.fresh.vocab_size=2"]),
    ],
)
def test_what_could_never_be_used_is_refused_in_a_sentence(model, words, parts):
    with pytest.raises(UserError) as refused:
        prepared(model, *words)
    assert all(part in str(refused.value) for part in parts), refused.value
