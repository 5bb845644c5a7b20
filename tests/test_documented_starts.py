"""Each `accept` block of README.md and docs/: what it starts passes every check of a dry run, on a
small model in a folder that has the files of the page and nothing else."""

import json
import re
import shlex
import shutil
import string

import pytest
from pyarrow import Table, parquet
from run_documented import blocks, files
from test_readme import DOCUMENTS, FILES, concrete

from rlcore.cli import main
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

SMALL = FreshModelSpec(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=32)
ROW = {"question": "1+1=", "problem": "1+1=", "answer": "#### 2", "prompt": "1+1="}
# functions of a reader, of whom pages give the name alone
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def accuracy_reward(completions, **kwargs):
    return [1.0 for _ in completions]


def format_reward(completions, **kwargs):
    return [1.0 for _ in completions]
"""
# what this machine may lack, by the words that a refusal says it with
LACKS = re.compile(r"\bGPUs?\b|CUDA|not installed|needs the package|nodes|does not answer")
# and how the reader's model differs from the small one
UNLIKE = re.compile(
    r"has another vocabulary than|masked-diffusion models only ones of LLaDA's form"
)
# words that another command's output or another model is needed for
ELSEWHERE = ("config_dir=imported", "learner.router_replay=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model of all printable characters, with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "model"
    build_fresh_model(folder, string.printable, SMALL, seed=0, max_len=1 << 17)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def started(name):
    """The words of each run that an accept block of a page starts, as a reader fills them in."""
    for block in blocks(name):
        for line in block.lines() if block.tag == "accept" else ():
            words = shlex.split(line)
            starts = words[:2] in (["rlcore", "train"], ["rlcore", "sweep"])
            if starts and not {"--help", *ELSEWHERE} & set(words):
                yield [concrete(w) for w in words[1:] if w not in ("...", "resume=auto")]


def placed(word):
    """A word with a file and a folder in place of the reader's."""
    key, _, value = word.partition("=")
    if key in ("model", "model.path") and "/" in value:
        return f"{key}=./FOLDER"
    return word.replace("=FILE", "=train.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if any(started(name))])
def test_what_a_page_starts_passes_a_dry_run(name, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = [ROW | dict.fromkeys(("question", "problem", "prompt"), f"{n}+1=") for n in range(200)]
    rows = "".join(json.dumps(row) + "\n" for row in made)
    texts = {"train.jsonl": rows, "test.jsonl": rows, "reward.py": REWARDS}
    for file, content in {**FILES, **texts, **files("README.md"), **files(name)}.items():
        (tmp_path / file).write_text(content)
    parquet.write_table(Table.from_pylist(made), "train.parquet")
    for place in ("FOLDER", "cache/models/smollm2-135m"):
        shutil.copytree(model, tmp_path / place)
    refused = []
    for number, words in enumerate(started(name)):
        own = [placed(word) for word in words if not word.startswith("run_dir=")]
        code = main([*own, f"run_dir=r{number}", "dry_run=true"])
        said = capsys.readouterr().err.strip().partition("rlcore: ")[2]
        if code != 0 and not LACKS.search(said) and not UNLIKE.search(said):
            refused.append(f"{' '.join(own)}\n  {said}")
    assert not refused, "\n".join(refused)
