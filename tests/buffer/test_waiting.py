"""What waits in the buffer, followed from change to change."""

from rlcore.buffer.admission import Candidate
from rlcore.buffer.batches import Waiting


def test_a_group_that_finishes_is_counted_once_and_others_are_not():
    waiting = Waiting([Candidate(3, 5, False), Candidate(4, 5, True, uses_left=2)])
    assert (waiting.uses_left, waiting.finished) == (3, 1)
    for group_id in (3, 3, 4, 99):  # 99 has been taken already
        waiting.finish(group_id)
    assert waiting.groups == [Candidate(3, 5, True), Candidate(4, 5, True, uses_left=2)]
    assert waiting.finished == 2
