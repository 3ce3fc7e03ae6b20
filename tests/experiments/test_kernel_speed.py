import jax

from experiments.kernel_speed import plain_prefill, repeated
from pallas_kernels.cases import _gated_delta_net, _prefill_gated_delta_net
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


def test_a_state_that_is_overwritten_is_carried_once():
    """Twice, and every turn of the loop would copy it."""
    case = _gated_delta_net(GatedDeltaNet("small", 1, 2, 16, 32, 4, 5), 1, 3, "float32", RTX_3090, min)
    loop = repeated(case.function, case.layers, case.advance)
    arguments, rest = jax.eval_shape(lambda arguments: loop(arguments, 2), case.arguments)
    state = case.arguments[1]
    shapes = [leaf.shape for leaf in jax.tree.leaves((arguments, rest))]
    assert shapes.count(state.shape) == 1
    assert len(rest) == 3  # outputs, deltas and decays
