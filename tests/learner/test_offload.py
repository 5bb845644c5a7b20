"""What ZeRO-3 offloads is trained, saved, loaded and published as if it were not."""

import numpy as np
import offload_jobs as jobs
import pytest
from learner_helpers import on_ranks, small_model

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("clipped", marks=pytest.mark.slow),
        "bfloat16",
        pytest.param("adapters", marks=pytest.mark.slow),
    ],
)
def test_offload_changes_no_weight_checkpoint_or_publication(model, tmp_path, kind):
    folder = str(tmp_path)
    plain = on_ranks(2, jobs.trained_with, model, {}, folder, kind)
    # it resumes from the checkpoint that was written without offload
    moved = on_ranks(2, jobs.trained_with, model, jobs.BOTH, folder, kind)
    # a gradient that is clipped is scaled by its norm, which is added up in another order
    within = 2e-6 if kind == "clipped" else 0.0
    for one, other in zip(plain, moved, strict=True):
        for key in ("loaded", "resumed", "state", "published", "gradients"):
            assert one[key].keys() == other[key].keys()
            # what is published is rounded to bfloat16, and so may differ by its last bit
            last_bit = 2**-7 * _largest(one[key]) if within and key == "published" else 0.0
            assert _difference(one[key], other[key]) <= max(within, last_bit), key
        assert one["held"] == other["held"] and one["held"]
        for rows, its in zip(_rows(one), _rows(other), strict=True):
            assert rows == pytest.approx(its, rel=1e-4, abs=1e-6)
    assert plain[0]["moved"] > 1e-3


def _rows(result):
    return [*result["rows"], result["again"]]


def _largest(a):
    return max((float(np.abs(values).max()) for values in a.values()), default=0.0)


def _difference(a, b):
    return max((float(np.abs(a[name] - b[name]).max()) for name in a), default=0.0)


def test_states_on_disk_are_those_in_memory(tmp_path):
    builder = pytest.importorskip("deepspeed.ops.op_builder.cpu").AsyncIOBuilder()
    if not builder.is_compatible():
        pytest.skip("no libaio here")
    model = small_model(tmp_path / "m", hidden=1290)  # large enough for DeepSpeed to swap
    on_disk = {"optimizer": "nvme", "parameters": "cpu", "nvme_path": str(tmp_path / "disk")}
    plain = on_ranks(2, jobs.trained_with, model, {}, str(tmp_path), "bfloat16")
    moved = on_ranks(2, jobs.trained_with, model, on_disk, str(tmp_path), "bfloat16")
    for one, other in zip(plain, moved, strict=True):
        assert any(other["on disk"]) and not any(one["on disk"])
        for key in ("loaded", "resumed", "state", "published"):
            assert one[key].keys() == other[key].keys()
            assert _difference(one[key], other[key]) == 0.0, key
