"""Each remedy that a command's refusal names is applied: the command goes on, or refuses for
another reason; and every refusal of the package has such a remedy, or a reason why not."""

import contextlib
import io
import json

import pytest
from command_remedies import FORECASTS, OTHERS, PREPARED, WITHOUT
from refusals import changed, untried

from rlcore.cli import main
from rlcore.commands.preflight import prepare, refuse_another_run
from rlcore.config.compose import load, to_yaml
from rlcore.errors import UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

SHAPE = FreshModelSpec(
    hidden_size=32, layers=1, heads=4, kv_heads=2, head_dim=32, intermediate_size=32
)
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "model_type": "qwen3_moe"}
CONFIGS = {
    "model": {},
    "moe": MOE,
    "odd_moe": MOE | {"model_type": "odd_moe"},
    "other_moe": MOE | {"model_type": "olmoe"},
    "masked": {"model_type": "llada"},
    "latent": {"kv_lora_rank": 256},
    "wide": {},
}
LEARNER = {"step_s": 0.05, "token_s": 0.0, "publish_s": 0.01}
RATES = {
    "rates": {"learner": LEARNER},
    "critic_rates": {"learner": LEARNER, "beside": "critic=model"},
    "turn_rates": {"learner": LEARNER, "episodes": {}},
}
RUNS = ("run", "run2", "run3")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Files and folders by name."""
    at = tmp_path_factory.mktemp("given")
    for name, more in CONFIGS.items():
        shape = SHAPE.model_copy(update={"vocab_size": 40} if name == "wide" else {})
        folder = build_fresh_model(at / name, "0123456789= ", shape, seed=0, max_len=64)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | more))
    for name, rates in RATES.items():
        (at / name).write_text(json.dumps(rates))
    (at / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "#### 1"}) + "\n")
    for number, name in enumerate(RUNS, 2):
        (at / name).mkdir()
        run = load([f"run_dir={at / name}", "experiment=quickstart", f"learner.lr=1e-{number}"])
        (at / name / "config.yaml").write_text(to_yaml(run))
        (at / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return at


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _refusal(words):
    """The sentence that refuses a command; "" where it is accepted."""
    verb, *rest = words
    if not verb.startswith("prepare"):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            main(words)
        return said.getvalue().strip().removeprefix("rlcore: ")
    try:
        config = load(rest)
        prepare(config) if verb == "prepare" else refuse_another_run(config)
    except UserError as error:
        return str(error)
    return ""


def _filled(text, given):
    for name in [*CONFIGS, *RATES, *RUNS, "rows.jsonl"]:
        text = text.replace(f"{{{name.partition('.')[0]}}}", str(given / name))
    return text


CASES = [*FORECASTS, *PREPARED, *OTHERS]
FEW = {id(case) for case in CASES[::9]}


def _first(words, given):
    return _refusal(_filled(words, given).split())


@pytest.mark.parametrize(
    ("words", "said", "change"),
    [pytest.param(*c, marks=() if id(c) in FEW else pytest.mark.slow) for c in CASES],
)
def test_a_remedy_changes_the_next_sentence(words, said, change, given):
    before, remedy = _filled(words, given).split(), _filled(change, given).split()
    sentence = _refusal(before)
    assert "\n" not in sentence and said in sentence, sentence
    assert _refusal(changed(before, remedy)) != sentence


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_refusal_of_a_command_has_a_remedy_that_is_tried_or_a_reason(given):
    found = [_first(words, given) for words, _, _ in CASES]
    forgotten, idle = untried("commands", found, WITHOUT)
    assert (forgotten, idle) == ({}, [])
