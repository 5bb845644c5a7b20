from hypothesis import given
from hypothesis import strategies as st

from rlcore.seeding import derive_seed


def test_a_seed_is_the_same_in_every_process_and_version():
    assert derive_seed(0, "sample", 1, 2) == 5948520554951132763


@given(
    st.integers(0, 2**40),
    st.sampled_from(["sample", "eval", "epoch"]),
    st.lists(st.integers(0, 10**6), max_size=3),
)
def test_every_argument_counts(seed, purpose, indices):
    base = derive_seed(seed, purpose, *indices)
    assert 0 <= base < 2**63
    assert base != derive_seed(seed + 1, purpose, *indices)
    assert base != derive_seed(seed, purpose + "x", *indices)
    assert base != derive_seed(seed, purpose, *indices, 0)


def test_neighbouring_indices_do_not_run_together():
    assert derive_seed(0, "p", 1, 23) != derive_seed(0, "p", 12, 3)
