import jax

from experiments.kernel_speed import plain_prefill
from pallas_kernels.cases import _prefill_gated_delta_net
from pallas_kernels.device import RTX_3090
from pallas_kernels.shapes import GatedDeltaNet
from tests.kernels.implementations import COMPILE_QUICKLY, relative_rms


def test_plain_recurrence_computes_the_same():
    case = _prefill_gated_delta_net(GatedDeltaNet("small", 1, 2, 16, 16, 4, 2), 2, 130, RTX_3090)

    def both(key):
        arguments = case.make(key)
        return plain_prefill(*arguments, 0), case.reference(*arguments, 0)

    for plain, reference in zip(*jax.jit(both, compiler_options=COMPILE_QUICKLY)(jax.random.key(0)), strict=True):
        assert relative_rms(plain, reference) < case.tolerance
