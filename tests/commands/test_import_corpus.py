"""Every configuration that five trainers ship, at pinned commits, is imported as what it is.

tests/data/foreign_corpus.json lists (repository, file, trainer, schedule, max_staleness). The
repositories are cloned into cache/peers, or read from $RLCORE_PEERS/OWNER+NAME."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.extras.foreign import experiment, translate
from rlcore.extras.foreign_files import read
from rlcore.extras.foreign_harmless import DANGER

ROOT = Path(__file__).parents[2]
CORPUS = json.loads((ROOT / "tests/data/foreign_corpus.json").read_text())
GIVEN = {"model.path": "m", "task.args.grader": "a.py:f", "task.args.train_path": "t.jsonl"}
# Contradictions of the files, which ours refuses: a grader of other groups, an engine too short.
REFUSED = ("compares the samples of a group", "leaves no tokens for a prompt", "rollout.logprobs_k")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def checkout(repository):
    """A git folder that holds the pinned commit, or a skip."""
    own = Path(os.environ.get("RLCORE_PEERS", "/nowhere")) / repository.replace("/", "+")
    folder = own if own.exists() else ROOT / "cache/peers" / repository
    folder = folder / "repo" if (folder / "repo").exists() else folder
    if not folder.exists():
        url = f"https://github.com/{repository}"
        call = ["git", "clone", "-q", "--bare", "--filter=blob:none", url, str(folder)]
        if subprocess.run(call, timeout=600, check=False, capture_output=True).returncode:
            pytest.skip(f"{repository} cannot be cloned from here")
    return folder


@pytest.mark.parametrize("repository", CORPUS["commits"])
def test_shipped_configurations_are_imported_as_what_they_are(repository, tmp_path):
    folder, commit = checkout(repository), CORPUS["commits"][repository]
    rows = [row for row in CORPUS["files"] if row[0] == repository]
    wrong = []
    for at, (_, file, source, schedule, eta) in enumerate(rows):
        shown = subprocess.run(
            ["git", "-C", str(folder), "show", f"{commit}:{file}"], capture_output=True, check=True
        )
        path = tmp_path / f"{at}{Path(file).suffix}"
        path.write_bytes(shown.stdout)
        found_source, given = read(str(path))
        found = translate(found_source, given)
        got = [found_source, found.options["schedule"], found.values.get("schedule.max_staleness")]
        if got != [source, schedule, eta]:
            wrong.append(f"{file}: {got} is not {[source, schedule, eta]}")
        wrong += [f"{file}: harmless {h.key}" for h in found.harmless if DANGER.search(h.key)]
        wrong += refused(found, tmp_path / str(at), file)
    assert len(rows) > 5 and not wrong, "\n".join(wrong)


def refused(found, folder, file):
    """The refusal of the experiment, once what only the user can give is given."""
    target = folder / "experiment" / "x.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(experiment(found, "x"))
    more = [f"{key}={value}" for key, value in GIVEN.items() if key not in found.values]
    try:
        load(["experiment=x", "run_dir=r", *more], str(folder))
    except UserError as e:
        return [] if any(words in str(e) for words in REFUSED) else [f"{file}: {e}"]
    return []
