"""Which positions and tokens of a micro-batch each of several ranks has, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch
from learner_helpers import PlainEngine, make_groups

from rlcore.errors import UserError
from rlcore.learner.batch import build_batch
from rlcore.learner.engines.model_parallel import split_attention
from rlcore.learner.packing import dummy, pack
from rlcore.learner.probes import hold_in_parts
from rlcore.learner.ranks import Shards
from rlcore.learner.specs import LearnerSpec

KEY = "learner.sequence_parallel"


def _micro_batches(layout):
    batch = build_batch(make_groups(4), with_topk=False, device=torch.device("cpu"))
    return [*pack(batch.episodes, 40, layout), dummy()]


@pytest.mark.parametrize("layout", ["packed", "sorted"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_position_and_every_token_is_one_ranks(layout, count):
    for mb in _micro_batches(layout):
        shards = [Shards(None, index, count, KEY) for index in range(count)]
        whole = shards[0].padded(mb)
        width = whole.input_ids.shape[1]
        assert width % count == 0 and width - mb.input_ids.shape[1] < count
        parts = [shard.own(whole) for shard in shards]
        assert torch.equal(torch.cat([p.input_ids for p in parts], dim=1), whole.input_ids)
        tokens = torch.cat([shard.tokens(whole) for shard in shards])
        assert sorted(tokens.tolist()) == list(range(len(mb.targets)))
        for shard, part in zip(shards, parts):
            mine = shard.tokens(whole)
            assert torch.equal(part.targets, mb.targets[mine])
            read = mb.input_ids.flatten()[mb.predict[mine]]
            assert torch.equal(part.input_ids.flatten()[part.predict], read)
            place = mb.position_ids.flatten()[mb.predict[mine]]
            assert torch.equal(part.position_ids.flatten()[part.predict], place)


def test_padding_continues_the_last_sequence():
    mb = _micro_batches("packed")[0]
    width = mb.position_ids.shape[1]
    padded = Shards(None, 0, width + 3, KEY).padded(mb).position_ids[0, width:]
    assert padded.tolist() == [int(mb.position_ids[0, -1]) + n for n in (1, 2, 3)]


def _model(heads, key_heads):
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(UserError, match=r"sequence_parallel=5 .*12 attention heads") as refused:
        split_attention(_model(12, 2), Shards(None, 0, 5, KEY))
    assert str(refused.value).endswith("and 2 key heads; choose one of: 1, 2, 4, 6, 12.")
    with pytest.raises(UserError, match="choose one of: 1, 2, 6"):
        split_attention(_model(6, 2), Shards(None, 0, 3, KEY))


def test_an_engine_without_such_an_attention_says_so():
    with pytest.raises(UserError, match=r"sequence_parallel=2 .*learner\.engine=deepspeed"):
        PlainEngine.split_attention(torch.nn.Identity(), Shards(None, 0, 2, KEY))


def test_ranks_with_the_same_sequences_have_one_share():
    assert LearnerSpec(ranks=6, sequence_parallel=3).shares == 2


def test_a_model_with_windows_is_refused():
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    lm = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    with pytest.raises(UserError, match=r"sequence_parallel=2 .*whole context.*one of: 1\."):
        hold_in_parts(lm, Shards(None, 0, 2, KEY), split_attention, torch.device("cpu"))
