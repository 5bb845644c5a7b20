"""What a run notes of who worked and who waited, in simulated time."""

import itertools

import pytest

from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.specs import ScheduleSpec


@pytest.mark.parametrize("eta", [0, 2])
def test_the_spans_of_a_run_cover_its_time_once(eta, tmp_path):
    spec = ScheduleSpec(steps=8, groups_per_step=4, max_staleness=eta)
    simulation = simulate(Scenario(spec, learn_s=2.0), tmp_path)
    lines = simulation.reporter.timelines
    assert sorted(lines) == list(range(1, 9))
    spans = [span for step in sorted(lines) for span in lines[step]]
    learner = [span for span in spans if span[0] == "learner"]
    for (*_, end, _), (_, _, start, *_) in itertools.pairwise(learner):
        assert end == pytest.approx(start, abs=0.002)  # nothing between them, nothing twice
    covered = sum(end - start for _, _, start, end, _ in learner)
    assert covered == pytest.approx(simulation.reporter.rows[-1]["time/total_s"], abs=0.05)
    trained = [end - start for _, what, start, end, _ in learner if what == "optimizer step 3"]
    assert sum(trained) == pytest.approx(2.0, abs=0.01)
    published = [what for who, what, *_ in spans if who == "publications"]
    assert published == [f"version {v}" for v in range(1, 9)][: len(published)]
    assert len(published) >= 7  # the last one may end after its row
    shares = [share for who, what, *_, share in spans if what == "decode"]
    assert shares and all(0.0 <= share <= 1.0 for share in shares)


def test_samples_are_shown_again_with_the_ratios_of_their_tokens(tmp_path):
    simulation = simulate(Scenario(ScheduleSpec(steps=3, groups_per_step=4)), tmp_path)
    samples = [sample for shown in simulation.reporter.shown.values() for sample in shown]
    assert samples and all(sample["log_ratio"] == [0.25] for sample in samples)
    assert all(sample["advantage"] == 0.5 for sample in samples)
    assert all(sample["learner_version"] >= sample["versions"][1] for sample in samples)
