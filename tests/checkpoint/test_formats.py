"""Every format against dequantisers written here a second time, and every contradiction between tensors."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen38_jax.checkpoint import CheckpointError, unpack
from qwen38_jax.checkpoint.files import TensorInfo
from qwen38_jax.checkpoint.formats import PARTS, Declared, Stored, classify
from qwen38_jax.quantization import QuantTensor, dequantize
from tests.checkpoint.packing import awq, compressed, gptq, load_matrix, random_matrix, values, words

V1, V2 = Declared("gptq", None), Declared("gptq_v2", None)


def _assert_loads(tmp_path, parts, m, **arguments):
    w = load_matrix(tmp_path, parts, shape=m.u.shape, **arguments)
    assert isinstance(w, QuantTensor) and w.bits == m.bits and w.group == m.u.shape[1] // m.s.shape[1]
    np.testing.assert_array_equal(dequantize(w), m.matrix)
    return w


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_compressed_tensors(tmp_path, bits, groups, symmetric, order, dtype):
    # 20 rows are no whole words of zero points, which are packed along the rows.
    m = random_matrix(20, 64, groups, bits, symmetric=symmetric, order=order, dtype=dtype)
    w = _assert_loads(tmp_path, compressed(m, order=order, zeros=not symmetric), m)
    assert w.scales.dtype == dtype
    assert (w.zeros is None) == symmetric and (w.group_of is None) == (not order or groups == 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("less", [0, 1])
def test_gptq_symmetric_whatever_the_label_says(tmp_path, bits, groups, order, less):
    m = random_matrix(24, 64, groups, bits, order=order)
    for declared in (V1, V2, Declared(None, None), Declared("gptq", True)):
        w = _assert_loads(tmp_path, gptq(m, less), m, declared=declared)
        assert w.zeros is None and (w.group_of is None) == (not order or groups == 1)
    without = {part: value for part, value in gptq(m, less).items() if part != "g_idx"}
    if not order:
        _assert_loads(tmp_path, without, m)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", [False, True])
def test_gptq_asymmetric(tmp_path, bits, order):
    m = random_matrix(24, 128, 4, bits, symmetric=False, order=order)
    _assert_loads(tmp_path, gptq(m, 1), m, declared=V1)
    _assert_loads(tmp_path, gptq(m, 0), m, declared=V2)
    with pytest.raises(CheckpointError, match=r"layers\.0\.qzeros'.*checkpoint_format.*'gptq' .*'gptq_v2'"):
        load_matrix(tmp_path, gptq(m, 1), shape=m.u.shape)
    with pytest.raises(CheckpointError, match=r"layers\.0\.qzeros.*says that the codes are symmetric"):
        load_matrix(tmp_path, gptq(m, 1), shape=m.u.shape, declared=Declared("gptq", True))


@pytest.mark.parametrize("less, lie", [(0, V1), (1, V2)])
def test_a_lying_label_of_asymmetric_zeros_is_seen(tmp_path, less, lie):
    m = random_matrix(64, 512, 4, symmetric=False)
    m.u = np.clip(np.rint(np.random.default_rng(1).normal(m.z[:, m.g_idx], 2.5)), 0, 15).astype(int)
    assert abs((m.u - m.z[:, m.g_idx]).mean()) < 0.2
    parts = gptq(m, less)
    load_matrix(tmp_path, parts, shape=m.u.shape, declared=V1 if less else V2)
    with pytest.raises(CheckpointError, match=r"layers\.0\.qzeros' read as 'gptq.*steps from zero.*checkpoint_format"):
        load_matrix(tmp_path, parts, shape=m.u.shape, declared=lie)


def test_a_zero_point_that_less_1_cannot_store_is_an_error(tmp_path):
    m = random_matrix(24, 64, 4, symmetric=False)
    m.z[3, 1] = 0
    with pytest.raises(CheckpointError, match=r"layers\.0\.qzeros' holds the zero point 15.*says 'gptq'"):
        load_matrix(tmp_path, gptq(m, 1), shape=m.u.shape, declared=V1)
    m.matrix = (m.u - m.z[:, m.g_idx]).astype(np.float32) * m.s[:, m.g_idx].astype(np.float32)
    _assert_loads(tmp_path, gptq(m, 0), m, declared=V2)


@pytest.mark.parametrize(
    "said, want",
    [
        ({"checkpoint_format": "gptq", "sym": True}, Declared("gptq", True)),
        ({"checkpoint_format": "gptq_v2", "sym": False}, Declared("gptq_v2", False)),
        ({"packing_format": "auto_round:auto_gptq"}, Declared("gptq", None)),
        ({"checkpoint_format": "marlin", "sym": "yes"}, Declared(None, None)),
        ("nonsense", Declared(None, None)),
        (None, Declared(None, None)),
    ],
)
def test_what_a_config_declares(said, want):
    assert Declared.from_hf({"quantization_config": said}) == want


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(tmp_path, symmetric):
    m = random_matrix(24, 64, 4, symmetric=symmetric)
    assert (_assert_loads(tmp_path, awq(m), m).zeros is None) == symmetric


@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (1, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_becomes_the_models_dtype(tmp_path, shape, dtype):
    rng = np.random.default_rng(0)
    weight = (50 * rng.normal(size=shape)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((-(-shape[0] // 128), -(-shape[1] // 128))).astype(ml_dtypes.bfloat16)
    blocks = np.kron(scales.astype(np.float32), np.ones((128, 128), np.float32))[: shape[0], : shape[1]]
    w = load_matrix(tmp_path, {"weight": weight, "weight_scale_inv": scales}, shape=shape, dtype=dtype)
    np.testing.assert_array_equal(w, (weight.astype(np.float32) * blocks).astype(dtype))


@pytest.mark.parametrize("chunk_bytes", [1, 300, 5000])
@pytest.mark.parametrize("form", ["compressed", "gptq", "awq", "fp8"])
def test_reading_in_chunks_changes_nothing(tmp_path, monkeypatch, chunk_bytes, form):
    monkeypatch.setattr(unpack, "CHUNK_BYTES", chunk_bytes)
    if form == "fp8":
        return test_fp8_becomes_the_models_dtype(tmp_path, (130, 300), "float32")
    m = random_matrix(24, 64, 4, symmetric=False)
    parts = {"compressed": compressed(m, zeros=True), "gptq": gptq(m), "awq": awq(m)}[form]
    _assert_loads(tmp_path, parts, m, declared=V1)


def test_stacked_layers_share_what_only_some_of_them_have(tmp_path):
    plain = random_matrix(16, 64, 4, seed=1)
    shifted = random_matrix(16, 64, 4, symmetric=False, dtype="bfloat16", seed=2)
    ordered = random_matrix(16, 64, 4, order=True, seed=3)
    layers = compressed(plain), compressed(shifted, zeros=True), compressed(ordered, order=True)
    w = load_matrix(tmp_path, *layers, shape=(16, 64))
    assert w.shape == (3, 16, 64) and w.scales.dtype == np.float32
    np.testing.assert_array_equal(dequantize(w), [m.matrix for m in (plain, shifted, ordered)])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_compressed_tensors_itself_agrees(tmp_path_factory, data):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize as theirs

    bits, group = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([8, 32]))
    n, k = data.draw(st.integers(1, 21)), group * data.draw(st.sampled_from([1, 2, 3, 5]))
    symmetric = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.tensor(rng.integers(low, high, (n, k)), dtype=torch.int8)
    scales = torch.tensor(rng.normal(size=(n, k // group)), dtype=torch.float16)
    zeros = torch.tensor(rng.integers(low, high, scales.shape) * (not symmetric), dtype=torch.int8)
    args = QuantizationArgs(num_bits=bits, strategy="group", group_size=group, symmetric=symmetric)
    want = theirs(codes, scales.float(), zeros, args, dtype=torch.float32)
    parts = {"weight_packed": pack_to_int32(codes, bits).numpy(), "weight_scale": scales.numpy()}
    if not symmetric:
        parts["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).numpy()
    w = load_matrix(tmp_path_factory.mktemp("ct"), parts, shape=(n, k))
    np.testing.assert_array_equal(dequantize(w), want.numpy())


def _changed(make, **changes):
    """Tensors of a sound matrix [24, 64] in 4 groups with some replaced by what a function makes of them."""

    def parts(m):
        made = make(m)
        for part, change in changes.items():
            made[part] = change(made[part])
            if made[part] is None:
                del made[part]
        return made

    return parts


def _put(value):
    def change(array):
        array = array.copy()
        array[1, 2] = value
        return array

    return change


def _asymmetric(m):
    return compressed(m, zeros=True)


FAULTS = {
    "nan scale": (_changed(compressed, weight_scale=_put(np.nan)), ["weight_scale", "nan", "1 places"]),
    "infinite scale": (_changed(gptq, scales=_put(-np.inf)), ["scales", "-inf"]),
    "shape lies": (
        _changed(compressed, weight_shape=lambda s: s[::-1].copy()),
        ["weight_shape", "[64, 24]", "[24, 64]"],
    ),
    "shape is no pair": (_changed(compressed, weight_shape=lambda s: s[:1].copy()), ["weight_shape", "[1]", "[2]"]),
    "packed is cut": (
        _changed(compressed, weight_packed=lambda w: w[:, :-1].copy()),
        ["weight_packed", "[24, 7]", "[24, 8] (4 bits)", "[24, 16] (8 bits)"],
    ),
    "packed is no int32": (_changed(compressed, weight_packed=lambda w: w.astype(np.int64)), ["weight_packed", "I64"]),
    "scales are of other rows": (
        _changed(compressed, weight_scale=lambda s: s[:-1].copy()),
        ["weight_scale", "[23, 4]", "[24, 4]"],
    ),
    "scales are integers": (_changed(compressed, weight_scale=lambda s: s.astype(np.int32)), ["weight_scale", "I32"]),
    "groups do not divide the columns": (
        _changed(compressed, weight_scale=lambda s: s[:, :3].copy()),
        ["weight_scale", "3 groups", "64 columns"],
    ),
    "scales are a vector": (_changed(compressed, weight_scale=lambda s: s[:, 0].copy()), ["weight_scale", "[24]"]),
    "zeros are of other rows": (
        _changed(_asymmetric, weight_zero_point=lambda z: z[:-1].copy()),
        ["weight_zero_point", "[2, 4]", "[3, 4]"],
    ),
    "no scales": (_changed(compressed, weight_scale=lambda s: None), ["weight_packed", "lacks", "weight_scale"]),
    "no zeros": (_changed(gptq, qzeros=lambda z: None), ["lacks", "qzeros"]),
    "a bias": (lambda m: {**gptq(m), "bias": np.eye(24, dtype=np.float16)[0]}, ["bias", "is not 0"]),
    "a bias of other rows": (lambda m: {**gptq(m), "bias": m.s[0]}, ["bias", "[4]", "[24]"]),
    "group numbers out of range": (_changed(gptq, g_idx=lambda g: g + 1), ["g_idx", "from 1 to 4", "4 groups"]),
    "a group that no column names": (_changed(gptq, g_idx=lambda g: g * 0), ["g_idx", "from 0 to 0", "4 groups"]),
    "group numbers cut": (_changed(gptq, g_idx=lambda g: g[1:].copy()), ["g_idx", "[63]", "[64]"]),
    "two forms": (lambda m: {**compressed(m), "weight": m.matrix}, ["weight'", "second form", "weight_packed"]),
    "two packings": (lambda m: {**compressed(m), **gptq(m)}, ["qweight", "second form"]),
    "nvfp4": (lambda m: {**compressed(m), "weight_global_scale": np.ones(1, np.float32)}, ["NVFP4"]),
    "scaled int8": (lambda m: {"weight": m.u.astype(np.int8), "weight_scale": m.s}, ["weight (I8)", "not supported"]),
    "scales alone": (lambda m: {"weight_scale_inv": m.s}, ["weight_scale_inv", "not supported"]),
}


@pytest.mark.parametrize("parts, fragments", FAULTS.values(), ids=FAULTS)
def test_contradictions_are_told_with_the_tensor_and_both_facts(tmp_path, parts, fragments):
    m = random_matrix(24, 64, 4)
    with pytest.raises(CheckpointError) as raised:
        load_matrix(tmp_path, parts(m), shape=(24, 64))
    for fragment in ("layers.0.", *fragments):
        assert fragment in str(raised.value)


def test_a_group_size_that_does_not_divide_the_columns_is_seen_by_the_shapes_alone(tmp_path):
    """192 columns in groups of 128 are two groups; two groups of 96 would load, and be wrong."""
    m = random_matrix(8, 192, 2)
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight_scale' has 2 groups for the 192 columns"):
        load_matrix(tmp_path, compressed(m), shape=(8, 192))


def test_a_shape_that_is_missing_is_inferred(tmp_path):
    m = random_matrix(24, 64, 4)
    _assert_loads(tmp_path, compressed(m, shape=False), m)
    parts = compressed(m)
    _assert_loads(tmp_path, {**parts, "weight_shape": parts["weight_shape"].astype(np.int32)}, m)


def test_a_bias_of_zeros_is_nothing(tmp_path):
    m = random_matrix(24, 64, 4)
    _assert_loads(tmp_path, {**gptq(m), "bias": np.zeros(24, np.float16)}, m)


def test_an_unset_order_is_none(tmp_path):
    m = random_matrix(24, 64, 4)
    _assert_loads(tmp_path, {**compressed(m), "weight_g_idx": np.full(64, -1, np.int32)}, m)


def test_zero_scales_make_zeros(tmp_path):
    m = random_matrix(24, 64, 4)
    m.s[2] = 0
    m.s[3] = np.float16(6e-8)  # denormal
    m.matrix = (m.u - 8).astype(np.float32) * m.s[:, m.g_idx].astype(np.float32)
    w = _assert_loads(tmp_path, compressed(m), m)
    assert (np.asarray(dequantize(w))[2] == 0).all()


def test_scales_beyond_the_dtype_are_an_error(tmp_path):
    m = random_matrix(24, 64, 4, dtype="float32")
    m.s[1, 2] = 1e5
    load_matrix(tmp_path, compressed(m), shape=(24, 64))
    with pytest.raises(CheckpointError, match=r"weight_scale' holds a scale of 100000.*float16"):
        load_matrix(tmp_path, compressed(m), shape=(24, 64), dtype="float16")


@pytest.mark.parametrize("bad", ["scale", "value"])
def test_fp8_that_is_not_finite_is_an_error(tmp_path, bad):
    weight, scales = np.ones((8, 8), ml_dtypes.float8_e4m3fn), np.ones((1, 1), np.float32)
    (scales if bad == "scale" else weight)[0, 0] = np.nan
    name = "weight_scale_inv" if bad == "scale" else "weight"
    with pytest.raises(CheckpointError, match=f"layers.0.{name}' holds nan"):
        load_matrix(tmp_path, {"weight": weight, "weight_scale_inv": scales}, shape=(8, 8))


def test_fp8_scales_of_another_block_size_are_an_error(tmp_path):
    parts = {"weight": np.ones((128, 128), ml_dtypes.float8_e4m3fn), "weight_scale_inv": np.ones((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=r"weight_scale_inv' has shape \[2, 2\].*\[1, 1\]"):
        load_matrix(tmp_path, parts, shape=(128, 128))


def test_the_packers_of_these_tests_are_inverse():
    u = np.random.default_rng(0).integers(0, 16, (16, 24))
    for axis in (0, 1):
        np.testing.assert_array_equal(values(words(u, 4, axis), 4, axis), u)


_SHAPES = st.one_of(
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 24, 64]), max_size=3).map(tuple),
    st.sampled_from([(24, 64), (24, 8), (8, 24), (64, 3), (24, 4), (4, 24), (4, 3), (3, 4), (64,), (2,)]),
)
_DTYPES = st.sampled_from(["I32", "I64", "F16", "BF16", "F32", "F8_E4M3", "U8"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(PARTS)), st.tuples(_SHAPES, _DTYPES), min_size=1, max_size=6))
def test_no_set_of_tensors_escapes(parts):
    tensors = {part: TensorInfo(f"x.{part}", dtype, shape, Path("f"), 0) for part, (shape, dtype) in parts.items()}
    for shape in ((24, 64), (24,), (24, 4)):
        result = classify("x.weight", tensors, shape, V1)
        if isinstance(result, Stored):
            assert result.shape == shape and result.label
        else:
            assert result and all("x." in problem for problem in result)
