"""What a publication and a checkpoint hold in any process beside what the learner holds."""

import publication_jobs as jobs
import pytest
from learner_helpers import on_ranks

pytestmark = pytest.mark.ranks
# two buckets, and the largest tensor in float32 and bfloat16; 3%: headers and checksums
BOUND = 1.03 * (2 * jobs.BUCKET + 1.5 * jobs.LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_publication_holds_two_buckets_and_a_tensor_in_any_process(tmp_path, world):
    model = jobs.model_of_many_layers(tmp_path / "m")
    ranks = on_ranks(world, jobs.extra_of_publications, model, str(tmp_path))
    assert len(ranks[0]) == 2 * len(jobs.TRANSPORTS)
    for one in ranks:
        for case, (size, tensors, arrays, *received) in one.items():
            # on a busy machine gloo's threads let go of a bucket after it has been waited for
            bound = BOUND + jobs.BUCKET * (case[1] == "gloo")
            assert size > 5 * bound
            assert tensors < bound and arrays < bound, case
            assert max(received, default=0) < bound, case
    # what is measured is not nothing
    assert ranks[0][0, "object_store"][1] > 1.5 * jobs.BUCKET


@pytest.mark.slow
def test_a_checkpoint_holds_each_ranks_own_part(tmp_path):
    model = jobs.model_of_many_layers(tmp_path / "m")
    for rank in on_ranks(2, jobs.extra_of_checkpoints, model, str(tmp_path)):
        for stage, (state, extra) in rank.items():
            assert 0.48 * state < extra < 0.52 * state, stage
