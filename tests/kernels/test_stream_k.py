import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels._stream_k import schedule


@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 300))
def test_programs_share_the_units_evenly(blocks, steps, programs):
    plan = schedule(blocks, steps, programs)
    firsts = np.array([plan.first_unit(p) for p in range(plan.programs + 1)])
    assert firsts[0] == 0 and firsts[-1] == plan.units
    taken = np.diff(firsts)
    assert taken.min() >= 1 and taken.max() - taken.min() <= 1
    owners = np.repeat(np.arange(plan.programs), taken)
    np.testing.assert_array_equal(owners, [plan.program_of(u) for u in range(plan.units)])
    shared = owners.reshape(blocks, steps)
    assert plan.slots == (shared[:, -1] - shared[:, 0] + 1).max()


def test_too_many_units_for_32_bits():
    with pytest.raises(ValueError, match="overflow 32 bits"):
        schedule(1 << 16, 1 << 8, 1 << 8)
