from rlcore.cluster.clients.learner import RankGroup, deal


def test_groups_are_dealt_whole_and_evenly():
    groups = [(i, tokens) for i, tokens in enumerate([100, 5, 60, 40, 1, 90])]
    shares = deal(groups, 2)
    assert sorted(shares[0] + shares[1]) == list(range(6))
    loads = [sum(dict(groups)[g] for g in share) for share in shares]
    assert abs(loads[0] - loads[1]) <= 10
    assert deal(groups, 1) == [[0, 1, 2, 3, 4, 5]]
    assert deal(groups[:1], 3) == [[0], [], []]


def test_neighbours_that_hold_parts_of_sequences_have_the_same_share():
    group = RankGroup("policy", ["a", "b", "c", "d"], timeout_s=1, shares=2)
    assert group.of_each(["first", "second"]) == ["first", "first", "second", "second"]
    assert RankGroup("policy", ["a", "b"], timeout_s=1).of_each([1, 2]) == [1, 2]
