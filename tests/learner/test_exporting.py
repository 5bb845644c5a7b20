"""An export from a checkpoint's files is, byte by byte, the one of ranks that loaded them."""

import json
from pathlib import Path

import distill_jobs
import pytest
from learner_helpers import ALPHABET, make_groups, make_job, on_ranks, small_model
from lora_jobs import LORA
from rank_jobs import learner, share
from tiny_mixture import tiny_mixture

from rlcore.errors import StageError
from rlcore.learner.exporting import export_stored

BF16 = {"dtype": "bfloat16", "zero_stage": 3}
JOBS = {
    "whole": {},
    "divided": BF16,
    "adapters": {"lora": LORA},
    "divided adapters": {**BF16, "lora": LORA},
    "sparse copy": {"sparse": distill_jobs.RULE, "distill": distill_jobs.distill("k3")},
}


EXPERTS = {
    "experts": {"zero_stage": 2},
    "divided experts": {"zero_stage": 1, "ranks": 2, "expert_parallel": 2},
}


def _train_save_export(rank, world, port, model, folder, jobs):
    for name, options in jobs.items():
        one = learner(rank, world, port, model, **options)
        one.begin_phase([share(make_groups(5), rank, world)])
        one.train_step(0)
        one.save(Path(folder) / name / "state")
        one.export(Path(folder) / name / "ranks")


@pytest.mark.ranks
@pytest.mark.parametrize("jobs", [JOBS, EXPERTS], ids=["dense", "experts"])
def test_a_checkpoint_is_exported_without_its_ranks(tmp_path, jobs):
    model = str(tmp_path / "model")
    if jobs is EXPERTS:
        tiny_mixture(tmp_path / "model", ALPHABET, seed=3)
    else:
        small_model(tmp_path / "model")
    on_ranks(2, _train_save_export, model, str(tmp_path), jobs)
    for name, options in jobs.items():
        folder = tmp_path / name
        export_stored(make_job(model, **options), folder / "state", folder / "files")
        theirs, ours = (_files(folder / side) for side in ("ranks", "files"))
        assert ours.keys() == theirs.keys() and len(ours) >= 3, name
        for file in ours:
            if file.name == "adapter_config.json":  # names the folder that it is beside
                both = [json.loads(one[file].read_text()) for one in (ours, theirs)]
                assert both[0]["r"] == both[1]["r"]
            else:
                assert ours[file].read_bytes() == theirs[file].read_bytes(), (name, file)


def _files(folder):
    return {path.relative_to(folder): path for path in folder.rglob("*.*")}


@pytest.mark.ranks
def test_a_state_of_another_model_is_refused(tmp_path):
    model = small_model(tmp_path / "model")
    on_ranks(1, _train_save_export, model, str(tmp_path), {"whole": {}})
    other = make_job(model, lora=LORA)
    with pytest.raises(StageError, match=r"state in .* does not fit the run's model"):
        export_stored(other, tmp_path / "whole" / "state", tmp_path / "other")
