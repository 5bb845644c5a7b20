"""Freeing a learner rank's memory: what is left out where nothing was moved."""

from types import SimpleNamespace

import pytest
import torch

from rlcore.learner import state


@pytest.mark.parametrize("moved, passes", [(0, 0), (7, 1)])
def test_a_pass_over_all_objects_is_made_only_where_something_was_moved(moved, passes, monkeypatch):
    made = {"passes": 0, "emptied": 0}

    def count(name):
        made[name] += 1

    monkeypatch.setattr(state.gc, "collect", lambda: count("passes"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: count("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 + 5 * made["emptied"], 80))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    rank = object.__new__(state.RankState)
    rank.engine = SimpleNamespace(device=torch.device("cuda"), release=lambda: moved)
    rank.companions = []
    # torch's cache is emptied in either case: an engine that wakes plans with that memory
    assert rank.release() == (5, 60)
    assert made == {"passes": passes, "emptied": 1}
