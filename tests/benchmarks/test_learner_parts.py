"""How the parts of a learner step are measured: in turns, the first round apart."""

from benchmarks.speed import learner_parts


def test_parts_take_turns_and_the_first_round_does_not_count(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(learner_parts.time, "perf_counter", lambda: clock[0])

    def part(name, seconds):
        def run():
            order.append(name)
            # slow once, while it warms up
            clock[0] += seconds if order.count(name) > 1 else 100.0

        return run

    found = learner_parts.alternated({"a": part("a", 1.0), "b": part("b", 2.0)}, rounds=3)
    assert found == {"a": 1.0, "b": 2.0}
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
