"""What the benchmark compares is the same computation."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import cases
from pallas_kernels.device import RTX_3090
from pallas_kernels.shapes import Attention
from tests.kernels.implementations import COMPILE_QUICKLY, relative_rms

SHAPE = Attention("small", 4, 2, 32, 16, 2)
CASES = {
    f"{dtype}, {name}": case
    for dtype in ("bfloat16", "int8")
    for name, case in {
        "verify": cases._verify_attention(SHAPE, 64, None, 3, dtype, RTX_3090, min),
        "window": cases._verify_attention(SHAPE, 64, 20, 3, dtype, RTX_3090, min),
        "prefill": cases._prefill_attention(SHAPE, 64, 24, dtype, RTX_3090, min),
    }.items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plain_jax_computes_the_same(case):
    def both(key):
        arguments = case.make(key)
        return case.plain(*arguments, 1), case.reference(*arguments, 1)

    plain, reference = jax.jit(both, compiler_options=COMPILE_QUICKLY)(jax.random.key(0))
    assert relative_rms(plain, reference) < case.tolerance
    assert jnp.abs(reference).max() > 0.1
