"""Routes of a request that is queued several times, and of episodes of several turns."""

import numpy as np

from rlcore.models.routes import ROUTES, RouteLog, joined, route_bytes
from rlcore.rollout.segments import Draw
from rlcore.serialization import dump_trajectory, load_trajectory
from rlcore.testing.records import make_sampling, make_trajectory
from rlcore.types import Request


def rows(start, end, mark=0):
    """Routes [n, 2, 2] that say which token they are of, and who said so."""
    return np.array([[[t, mark], [t, mark]] for t in range(start, end)], np.uint8)


def test_tokens_that_are_read_again_keep_their_first_experts():
    log = RouteLog()
    assert log.rows() is None
    for chunk in (rows(0, 4), rows(4, 5), rows(5, 6)):
        log.add(chunk)
    log.restart()  # resubmitted with what it had: the engine reads all of it again
    log.add(rows(0, 7, mark=1))
    log.add(rows(7, 8, mark=1))
    found = log.rows()
    assert found[:, 0, 0].tolist() == list(range(8))
    assert found[:, 0, 1].tolist() == [0] * 6 + [1] * 2
    assert found.dtype == np.uint8


def test_what_is_read_again_in_pieces_is_left_out_too():
    log = RouteLog(rows(0, 5))
    for chunk in (rows(0, 2, mark=1), rows(2, 4, mark=1), rows(4, 7, mark=1)):
        log.add(chunk)
    assert log.rows()[:, 0, 1].tolist() == [0] * 5 + [1] * 2


def test_another_engine_goes_on_with_the_routes_that_a_request_has():
    request = Request(0, 0, "t/train/0", np.array([3, 4, 5], np.int32), make_sampling(), seed=1)
    begun = make_trajectory(turns=(((3, 4, 5), (6, 7)),), k=20, extras={ROUTES: rows(0, 4)})
    begun.timings |= {"queue_s": 0.0, "generate_s": 1.0}
    draw = Draw(request, "d", budget=8, version=0)
    draw.go_on(begun)
    draw.routes.add(rows(0, 5, mark=1))
    draw.extend([8], (np.full((1, 21), 8, np.int32), np.zeros((1, 21), np.float32)))
    done = draw.finish("stop", "bf16-1", "bf16")
    assert done.extras[ROUTES][:, 0].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 1]]
    assert len(done.extras[ROUTES]) == len(done.token_ids) - 1


def test_turns_are_joined_by_who_read_a_token_first():
    turns = [
        make_trajectory(turns=(((1, 2), (3, 4)),), extras={ROUTES: rows(0, 3)}),
        make_trajectory(turns=(((1, 2, 3, 4, 5), (6,)),), extras={ROUTES: rows(0, 5, mark=1)}),
        make_trajectory(turns=(((1, 2, 3, 4, 5, 6, 7), (8, 9)),), extras={ROUTES: rows(0, 8, 2)}),
    ]
    found = joined(turns)[ROUTES]
    assert found[:, 0, 0].tolist() == list(range(8))
    assert found[:, 0, 1].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert joined([make_trajectory()]) == {}


def test_a_record_holds_routes_in_the_bytes_that_were_counted():
    t = make_trajectory(turns=((range(40), range(60)),))
    plain = len(dump_trajectory(t))
    t.extras[ROUTES] = np.random.default_rng(0).integers(0, 256, (99, 48, 8)).astype(np.uint8)
    data = dump_trajectory(t)
    assert np.array_equal(load_trajectory(data).extras[ROUTES], t.extras[ROUTES])
    assert 0 <= len(data) - plain - 99 * route_bytes(48, 8, 256) < 200
    assert route_bytes(48, 8, 512) == 2 * route_bytes(48, 8, 128)
