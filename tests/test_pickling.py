"""Records as they cross processes."""

import pickle

import pytest

from rlcore.references import RecordReference
from rlcore.serialization import StoredEpisode, dump_trajectory, read_header
from rlcore.testing.records import make_score, make_trajectory
from rlcore.types import Answer, Score

DRAWN = make_trajectory(3, 1)
SCORE = make_score(DRAWN, 0.5)


@pytest.mark.parametrize(
    "record",
    [
        read_header(dump_trajectory(DRAWN)),
        SCORE,
        RecordReference("shard", 7, 4096),
        StoredEpisode(SCORE, (RecordReference("shard", 7, 4096), b"here")),
        Answer(17, 0, "bf16-0:4", "digits/train/17", "0237", tokens=5, versions=(3, 4)),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_is_the_same_after_a_message(record):
    assert pickle.loads(pickle.dumps(record)) == record


def test_what_a_constructor_refuses_is_refused_in_a_message():
    good = pickle.dumps(Score(0, 0, "d", "ok", 1.0))
    with pytest.raises(ValueError, match="status 'no' with reward"):
        pickle.loads(good.replace(b"\x8c\x02ok", b"\x8c\x02no"))
