"""Whether this machine's products have the same bits in any company."""

import pytest
import torch

from rlcore.attention.bitwise import machine_reason


def differ() -> str | None:
    """The reason why this machine refuses bitwise=true; None: it does not."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    reason = machine_reason()
    torch.set_num_threads(before)
    return reason


def skip_where_they_differ():
    """Skip the test on a machine that refuses bitwise=true."""
    if reason := differ():
        pytest.skip(f"this machine has no such products: {reason}")
