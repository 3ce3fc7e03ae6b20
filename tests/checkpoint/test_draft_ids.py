import pickle
import zipfile

import numpy as np
import pytest

from qwen38_jax.checkpoint import CheckpointError
from qwen38_jax.checkpoint.draft_ids import read_draft_ids, write_draft_ids

IDS = np.array([0, 3, 5, 248319, 2**40], np.int64)


def test_what_is_written_is_read(tmp_path):
    write_draft_ids(tmp_path / "ids.pt", IDS)
    got = read_draft_ids(tmp_path / "ids.pt")
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, IDS)


def test_torch_reads_and_writes_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    write_draft_ids(tmp_path / "ours.pt", IDS)
    np.testing.assert_array_equal(torch.load(tmp_path / "ours.pt", weights_only=True).numpy(), IDS)
    torch.save(torch.tensor(IDS), tmp_path / "theirs.pt")
    np.testing.assert_array_equal(read_draft_ids(tmp_path / "theirs.pt"), IDS)


def test_other_things_that_torch_writes_are_errors(tmp_path):
    torch = pytest.importorskip("torch")
    ids = torch.tensor(IDS)
    others = {
        "int32": ids.int(),
        "matrix": ids[None],
        "list": [1, 2],
        "two": (ids, ids),
        "view": torch.arange(10)[2:5],
        "strided": torch.arange(10)[::2],
        "empty": ids[:0],
        "parameter": torch.nn.Parameter(ids.float()),
    }
    for name, value in others.items():
        torch.save(value, tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} is not a vector of int64"):
            read_draft_ids(tmp_path / name)
    torch.save(ids, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="legacy is not a vector of int64"):
        read_draft_ids(tmp_path / "legacy")


class _Attack:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of the file was run')",)


def _archive(path, content, data=b"\0" * 8):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", data)


def test_no_code_of_the_file_is_run(tmp_path):
    for content in (pickle.dumps(_Attack()), b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR."):
        _archive(tmp_path / "ids.pt", content)
        with pytest.raises(CheckpointError, match="asks for"):
            read_draft_ids(tmp_path / "ids.pt")


def _damage(path, change):
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.update({"archive/data/0": b"\0" * 16}),
        lambda files: files.pop("archive/data/0"),
        lambda files: files.pop("archive/data.pkl"),
        lambda files: files.update({"archive/byteorder": b"middle"}),
        lambda files: files.update({"archive/data.pkl": b"\x80\x02" + b"K\x01" * 40000 + b"."}),
        lambda files: files.update({"archive/data.pkl": files["archive/data.pkl"][:-10]}),
    ],
)
def test_damage_is_told(tmp_path, change):
    path = tmp_path / "ids.pt"
    write_draft_ids(path, IDS)
    _damage(path, change)
    with pytest.raises(CheckpointError, match=r"ids\.pt is not a vector"):
        read_draft_ids(path)


def test_big_endian_data(tmp_path):
    path = tmp_path / "ids.pt"
    write_draft_ids(path, IDS)
    _damage(path, lambda f: f.update({"archive/byteorder": b"big", "archive/data/0": IDS.astype(">i8").tobytes()}))
    np.testing.assert_array_equal(read_draft_ids(path), IDS)


def test_no_file_and_no_archive(tmp_path):
    with pytest.raises(CheckpointError, match=r"ids\.pt is missing.*mtp\.draft_lm_head"):
        read_draft_ids(tmp_path / "ids.pt")
    (tmp_path / "ids.pt").write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match=r"ids\.pt is not a vector"):
        read_draft_ids(tmp_path / "ids.pt")
