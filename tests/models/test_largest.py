"""The top k through blocks is that of a sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.models.largest import largest, largest_columns, row_maxima

ROWS = 5


@settings(max_examples=60, deadline=None)
@given(
    v=st.integers(1, 3000),
    k=st.integers(0, 12),
    levels=st.sampled_from([2, 50, 0]),
    seed=st.integers(0, 99),
)
def test_values_are_those_of_a_sort_and_columns_name_them_once(v, k, levels, seed):
    """`levels`: of how many numbers the entries are, so that they tie; 0: no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    k = min(k, v)
    z = torch.randn(ROWS, v, generator=generator)
    if levels:
        z = torch.randint(levels, (ROWS, v), generator=generator).float()
    z[0, : v // 2] = -torch.inf  # as truncated sampling leaves them
    values, columns = largest(z, k)
    order = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :k])
    assert torch.equal(z.gather(1, columns), values)
    assert all(len(set(row)) == k for row in columns.tolist())
    if not levels:
        finite = values.isfinite()
        assert torch.equal(columns[finite], order.indices[:, :k][finite])


@pytest.mark.parametrize("v", [300, 3001])
def test_blocks_of_the_rows_before_they_were_shifted_serve(v):
    z = torch.randn(ROWS, v, generator=torch.Generator().manual_seed(0))
    top, blocks = row_maxima(z, 8)
    assert (blocks is None) == (v == 300)
    assert torch.equal(top[:, 0], z.max(dim=1).values)
    columns = largest_columns(z - top, blocks, 8)
    assert torch.equal(columns, z.topk(8, dim=1).indices)
