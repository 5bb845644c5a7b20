"""The choice of responses by the learner's own log-probs."""

import math

import torch
from learner_helpers import make_batch, make_groups

from rlcore.learner.batch import PolicyScores
from rlcore.learner.rank import dense_acceptance, keep_accepted


def test_dense_acceptance_by_hand():
    inf = torch.tensor([[0.5, 0.5, 0.5], [0.2, 0.4, 0.9], [0.5, 0.5, 0.5]]).log()
    ref = torch.tensor([[0.25, 1.0, 0.1], [0.1, 0.1, 0.9], [0.5, 0.5, 0.5]]).log()
    ref[2, 0] = math.nan
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]]).bool()
    found = dense_acceptance(ref, inf, mask)
    torch.testing.assert_close(found, torch.tensor([0.75, (0.5 + 0.25 + 1.0) / 3, 0.5]))
    assert dense_acceptance(ref, inf, torch.zeros_like(mask)).tolist() == [1.0, 1.0, 1.0]


def test_each_group_keeps_its_most_accepted_in_order():
    groups = make_groups(3, samples=4)
    batch = make_batch(groups)
    wanted = torch.tensor([3, 0, 2, 1, 4, 4, 4, 4, 1, 3, 2, 0])  # ties go to the earlier
    ref = PolicyScores(batch.sent.logp_inf - 3.0 + wanted[:, None], batch.sent.logp_inf)
    kept, rows = keep_accepted(groups, batch, ref, 2)
    assert [[e.sample_index for e in g.episodes] for g in kept] == [[0, 2], [0, 1], [1, 2]]
    assert [len(g.episodes) for g in groups] == [4, 4, 4]  # the caller's own stay
    assert rows.nonzero()[:, 0].tolist() == [0, 2, 4, 5, 9, 10]
    again = make_batch(kept)
    width = again.sent.mask.shape[1]
    mine = ref.rows(rows, width)
    assert torch.equal(again.sent.sample_ids, batch.sent.sample_ids[rows])
    assert mine.logp.shape == again.sent.logp_inf.shape
    on = again.sent.mask
    assert torch.equal(mine.entropy[on], again.sent.logp_inf[on]) and mine.topk_ids is None
    whole, all_rows = keep_accepted(groups, batch, ref, 4)
    assert whole == groups and all_rows.all()
