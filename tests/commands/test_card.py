"""The model card that an export writes says what its run did."""

import json

import yaml

from rlcore.commands.evaluate import model_card
from rlcore.config.compose import load

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
