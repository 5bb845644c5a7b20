"""A frozen draft: the policy's version moves on, the engine's weights do not."""

import numpy as np
import pytest

pytestmark = pytest.mark.engine


def test_set_version_changes_versions_and_nothing_else(model_a, engine, ask, finish):
    before = engine.checksums(engine.names())
    engine.add(ask(3))
    early = []
    for _ in range(5):
        early += engine.step()
    engine.set_version(7)
    done = early + finish(engine)
    assert engine.version == 7 and engine.checksums(engine.names()) == before
    across = [t for t in done if len(t.sampled_ids) > 6]
    assert across
    for t in across:
        assert set(t.token_version.tolist()) == {0, 7} and (np.diff(t.token_version) >= 0).all()
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t), atol=1e-5)
