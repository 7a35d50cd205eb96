"""Other kinds of files become databases, bit for bit, or a clear error and nothing at all."""

from __future__ import annotations

import errno
import os
import resource
import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sapwood.data import LmdbReader, LmdbRecords, build_index, convert, list_databases, read_about
from sapwood.data.write import writer
from sapwood.errors import ConfigError, DataError
from sapwood.testing import faults
from tests.data import sources
from tests.data.databases import reference


def values(path: Path, name: str | None = None) -> list[bytes]:
    """As py-lmdb reads them, with the keys that were expected."""
    found = reference(path, None if name is None else name.encode())
    assert [key for key, _ in found] == [b"%010d" % n for n in range(len(found))]
    return [value for _, value in found]


def only(folder: Path, *names: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


# -- image folders ------------------------------------------------------------------------------


def test_an_image_folder_keeps_bytes_names_and_labels(tmp_path: Path) -> None:
    made = sources.images(tmp_path / "in", {"cat": 5, "dog/puppies": 3, "ant": 2})
    (tmp_path / "in/cat/notes.txt").write_text("no image")
    (tmp_path / "in/.hidden").mkdir()
    done = convert(tmp_path / "in", tmp_path / "a.mdb")
    assert (done.kind, done.records) == ("folder", 10)
    path = tmp_path / "a.mdb"
    assert values(path) == list(made.values())
    assert values(path, ".names") == [name.encode() for name in made]
    labels = [struct.unpack("<q", value)[0] for value in values(path, ".labels")]
    assert labels == [["ant", "cat", "dog"].index(name.split("/")[0]) for name in made]
    about = read_about(path)
    assert about is not None
    assert about["classes"] == ["ant", "cat", "dog"]
    only(tmp_path, "in", "a.mdb")


def test_labels_come_with_the_batches_of_a_shuffled_reader(tmp_path: Path) -> None:
    made = sources.images(tmp_path / "in", {"a": 40, "b": 40})
    path = tmp_path / "a.mdb"
    convert(tmp_path / "in", path, shuffle=3)
    names = values(path, ".names")
    assert sorted(names) == sorted(name.encode() for name in made) != names
    assert values(path) == [made[name.decode()] for name in names]
    labels = LmdbRecords(path, database=".labels", decode=lambda b: b.tensor.view(torch.int64))
    for batch in LmdbReader(path, 16, shuffle="global", rank=0, world=1):
        wanted = [names[n].startswith(b"b/") for n in batch.index.tolist()]
        assert labels.take(batch.index).flatten().tolist() == wanted
        assert [bytes(one) for one in batch] == [values(path)[n] for n in batch.index.tolist()]
    labels.close()


def test_a_flat_folder_has_no_labels_and_other_files_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / f"in/{n}.TXT").write_bytes(b"x" * n)
    convert(tmp_path / "in", tmp_path / "a.mdb", suffixes=[".txt"])
    assert values(tmp_path / "a.mdb") == [b"", b"x", b"xx"]
    assert set(list_databases(tmp_path / "a.mdb")) == {b".about", b".names"}


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, "no files with .jpg"),
        ({"": 1, "a": 1}, "lies beside folders of classes"),
        ({"a": 1, "b": 0}, "b: a class without files"),
    ],
)
def test_a_folder_that_is_no_image_folder(tmp_path: Path, classes, message: str) -> None:
    (tmp_path / "in").mkdir()
    sources.images(tmp_path / "in", classes)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "in", tmp_path / "a.mdb")
    only(tmp_path, "in")


def test_a_link_in_a_circle(tmp_path: Path) -> None:
    sources.images(tmp_path / "in", {"a": 1})
    (tmp_path / "in/a/back").symlink_to("..")
    with pytest.raises(DataError, match="a link leads back"):
        convert(tmp_path / "in", tmp_path / "a.mdb")


# -- arrays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "|u1", "<c16", "|S5", [("x", "<f4"), ("y", "u1")]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_an_array_are_records(tmp_path: Path, dtype, order: str) -> None:
    rows = np.asarray(sources.array(50, dtype), order=order)
    np.save(tmp_path / "x.npy", rows)
    convert(tmp_path / "x.npy", tmp_path / "a.mdb")
    assert values(tmp_path / "a.mdb") == [row.tobytes() for row in rows]


def test_a_record_can_be_viewed_as_what_it_was(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20, 3, 7)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    convert(tmp_path / "x.npy", tmp_path / "a.mdb")
    about = read_about(tmp_path / "a.mdb")
    assert about is not None
    form = about["columns"][""]
    (batch,) = LmdbReader(tmp_path / "a.mdb", 20, shuffle="none", rank=0, world=1)
    found = batch.tensor.view(getattr(torch, form["dtype"])).view(-1, *form["shape"])
    assert torch.equal(found, torch.from_numpy(rows))


@pytest.mark.parametrize("shuffle", [None, 7])
def test_files_of_a_folder_are_parts_of_one_array(tmp_path: Path, shuffle: int | None) -> None:
    (tmp_path / "in").mkdir()
    parts = [sources.array(count, seed=count) for count in (3, 0, 20, 1)]
    for n, part in enumerate(parts):
        np.save(tmp_path / f"in/{n}.npy", part)
    convert(tmp_path / "in", tmp_path / "a.mdb", shuffle=shuffle)
    found, expected = values(tmp_path / "a.mdb"), [r.tobytes() for part in parts for r in part]
    assert (found == expected) == (shuffle is None)
    assert sorted(found) == sorted(expected)


def test_whole_arrays_are_records_with_their_shapes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/a.npy", np.arange(6).reshape(2, 3))
    np.save(tmp_path / "in/b.npy", np.float32(1.5))
    convert(tmp_path / "in", tmp_path / "a.mdb", whole=True)
    path = tmp_path / "a.mdb"
    assert values(path) == [np.arange(6).tobytes(), np.float32(1.5).tobytes()]
    assert values(path, ".names") == [b"a", b"b"]
    assert values(path, ".shapes")[0] == b'{"dtype": "int64", "shape": [2, 3]}'


def test_tensors_of_one_length_are_columns(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(30, 8).bfloat16(), "y": torch.arange(30), "a": torch.zeros(30, 0)}
    save_file(tensors, tmp_path / "s.safetensors")
    convert(tmp_path / "s.safetensors", tmp_path / "a.mdb", columns=["y", "x"])
    raw = tensors["x"].view(torch.uint8).numpy()
    assert values(tmp_path / "a.mdb", "x") == [row.tobytes() for row in raw]
    assert values(tmp_path / "a.mdb", "y") == [struct.pack("<q", n) for n in range(30)]
    about = read_about(tmp_path / "a.mdb")
    assert about is not None
    assert about["columns"]["x"] == {"dtype": "bfloat16", "shape": [8]}
    convert(tmp_path / "s.safetensors", tmp_path / "b.mdb", columns=["y"])
    assert len(values(tmp_path / "b.mdb")) == 30
    convert(tmp_path / "s.safetensors", tmp_path / "c.mdb", whole=True)
    assert values(tmp_path / "c.mdb")[1] == raw.tobytes()
    with pytest.raises(DataError, match=r"no records; choose one of its others.*: \.about, x, y"):
        LmdbReader(tmp_path / "a.mdb", 10, rank=0, world=1)


def test_columns_that_do_not_fit(tmp_path: Path) -> None:
    file, dest = tmp_path / "s.safetensors", tmp_path / "a.mdb"
    save_file({"x": torch.zeros(3, 2), "y": torch.zeros(4), "z": torch.tensor(1)}, file)
    with pytest.raises(ConfigError, match="x has 3 rows and y has 4"):
        convert(file, dest)
    with pytest.raises(ConfigError, match="z is a single number"):
        convert(file, dest, columns=["z"])
    with pytest.raises(ConfigError, match="no tensor 'q'; it has x, y, z"):
        convert(file, dest, columns=["q"])
    with pytest.raises(ConfigError, match="each once"):
        convert(file, dest, columns=["x", "x"])
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/0.npy", sources.array(3))
    np.save(tmp_path / "in/1.npy", sources.array(3, "<f8"))
    with pytest.raises(ConfigError, match=r"1.npy: expected float32 \[3, 7\] as in .*0.npy"):
        convert(tmp_path / "in", dest)
    only(tmp_path, "in", "s.safetensors")


# -- tar files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_each_ending_is_a_database_with_the_same_keys(tmp_path: Path, suffix: str) -> None:
    content = sources.samples(30)
    sources.tar(tmp_path / f"s.{suffix}", content)
    convert(tmp_path / f"s.{suffix}", tmp_path / "a.mdb")
    for column in ("jpg", "seg.png", "cls"):
        assert values(tmp_path / "a.mdb", column) == [parts[column] for _, parts in content]
    assert values(tmp_path / "a.mdb", ".names") == [name.encode() for name, _ in content]


def test_shards_in_a_folder_and_one_ending_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    content = [sources.samples(10, start) for start in (0, 10, 20)]
    for n, part in enumerate(content):
        sources.tar(tmp_path / f"in/{n:03d}.tar", part)
    convert(tmp_path / "in", tmp_path / "a.mdb", columns=["jpg"])
    assert values(tmp_path / "a.mdb") == [p["jpg"] for part in content for _, p in part]


def test_samples_that_differ(tmp_path: Path) -> None:
    content = [*sources.samples(5), ("part/odd", {"jpg": b"x", "txt": b"y"})]
    sources.tar(tmp_path / "s.tar", content)
    with pytest.raises(ConfigError, match="sample 'part/odd' has jpg, txt; expected cls, jpg"):
        convert(tmp_path / "s.tar", tmp_path / "a.mdb")
    convert(tmp_path / "s.tar", tmp_path / "a.mdb", columns=["jpg"])
    assert len(values(tmp_path / "a.mdb")) == 6
    sources.tar(tmp_path / "d.tar", [("a", {"jpg": b"1"}), ("a", {"jpg": b"2"})])
    with pytest.raises(DataError, match=r"d.tar: a.jpg is there twice"):
        convert(tmp_path / "d.tar", tmp_path / "b.mdb")
    only(tmp_path, "s.tar", "d.tar", "a.mdb")


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_a_tar_file_cut_off_anywhere_is_noticed(tmp_path: Path, suffix: str) -> None:
    whole, file = tmp_path / f"w.{suffix}", tmp_path / f"s.{suffix}"
    sources.tar(whole, [(f"{n}", {"bin": os.urandom(700)}) for n in range(8)])
    raw = whole.read_bytes()
    # The last bytes of a plain one are only padding, to blocks of 10240.
    sound = len(raw) - 10240 if suffix == "tar" else len(raw) - 1
    for size in sorted({*range(0, sound, max(sound // 23, 1)), 512, 1024, 2048}):
        file.write_bytes(raw[:size])
        with pytest.raises((DataError, ConfigError)):
            convert(file, tmp_path / "a.mdb")
    only(tmp_path, whole.name, file.name)


def test_a_damaged_header_in_the_middle_is_not_the_end(tmp_path: Path) -> None:
    file = tmp_path / "s.tar"
    sources.tar(file, [(f"{n}", {"bin": b"x" * 500}) for n in range(8)])
    sound = file.read_bytes()
    for damage in (b"\xff" * 20, bytes(512)):
        file.write_bytes(sound[:4096] + damage + sound[4096 + len(damage) :])
        with pytest.raises(DataError, match=r"s.tar: (byte 4096: expected the header|it goes on)"):
            convert(file, tmp_path / "a.mdb")
    only(tmp_path, "s.tar")


# -- what goes wrong ----------------------------------------------------------------------------


def test_damaged_arrays_are_refused_or_the_same(tmp_path: Path) -> None:
    """A flipped bit in the header may give another array, never a crash."""
    for file in (tmp_path / "x.npy", tmp_path / "x.safetensors"):
        if file.suffix == ".npy":
            np.save(file, sources.array(10))
        else:
            save_file({"x": torch.arange(10)}, file)
        sound = file.read_bytes()
        header = len(sound) - (840 if file.suffix == ".npy" else 80)
        for at in range(header):
            file.write_bytes(sound[:at] + bytes([sound[at] ^ 0x11]) + sound[at + 1 :])
            with suppress(DataError, ConfigError):
                convert(file, tmp_path / "a.mdb", force=True)
        for size in range(0, len(sound), 7):
            file.write_bytes(sound[:size])
            with pytest.raises(DataError, match=r"^[^\n]*(not a sound|expected)[^\n]*$"):
                convert(file, tmp_path / "b.mdb")
        file.write_bytes(sound + b"more")
        with pytest.raises(DataError, match="by its header, found"):
            convert(file, tmp_path / "b.mdb")
        file.unlink()
    only(tmp_path, "a.mdb")


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="Python objects"):
        convert(tmp_path / "x.npy", tmp_path / "a.mdb")


def test_what_is_no_source(tmp_path: Path) -> None:
    dest = tmp_path / "a.mdb"
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "both").mkdir()
    np.save(tmp_path / "both/x.npy", sources.array())
    sources.tar(tmp_path / "both/x.tar", [])
    np.save(tmp_path / "none.npy", sources.array(0))
    for source, options, message in [
        ("nowhere", {}, "no such file or folder"),
        ("x.txt", {}, r"a file that ends in \.npy"),
        ("x.txt", {"kind": "npy"}, "not a sound .npy"),
        ("x.txt", {"kind": "folder"}, "expects a folder"),
        ("x.txt", {"kind": "tar"}, "a name that ends in .tar"),
        ("x.txt", {"kind": "zip"}, "expected one of folder, npy"),
        ("both", {}, "npy and tar files; say which with --kind"),
        ("both", {"kind": "tar"}, "no samples in it"),
        ("both", {"kind": "safetensors"}, "no files in it that end in .safetensors"),
        ("both", {"kind": "npy", "columns": ["x"]}, "--column is for the kinds tar"),
        ("both", {"kind": "tar", "shuffle": 0}, "--shuffle is for the kinds folder"),
        ("none.npy", {}, "no records|not a sound"),
    ]:
        with pytest.raises((ConfigError, DataError), match=message):
            convert(tmp_path / source, dest, **options)
    only(tmp_path, "x.txt", "both", "none.npy")


def test_what_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", sources.array(5))
    dest = tmp_path / "a.mdb"
    dest.write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"a\.mdb exists; use --force"):
        convert(tmp_path / "x.npy", dest)
    (tmp_path / "bad.npy").write_bytes(b"x")
    with pytest.raises(DataError):
        convert(tmp_path / "bad.npy", dest, force=True)
    assert dest.read_bytes() == b"precious"
    convert(tmp_path / "x.npy", dest, force=True)
    assert len(values(dest)) == 5
    with pytest.raises(ConfigError, match="is a folder; expected a file, such as"):
        convert(tmp_path / "x.npy", tmp_path, force=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        convert(tmp_path / "x.npy", tmp_path / "none/a.mdb")
    only(tmp_path, "x.npy", "bad.npy", "a.mdb")


def test_two_at_once_and_what_a_killed_one_has_left(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", sources.array(5))

    def again(**_: object) -> None:
        with pytest.raises(DataError, match="is being written by another process"):
            convert(tmp_path / "x.npy", tmp_path / "a.mdb")

    with faults.inject("data.convert", again):
        convert(tmp_path / "x.npy", tmp_path / "a.mdb")
    (tmp_path / ".b.mdb.draft-sapwood").write_bytes(b"left by somebody who was killed" * 1000)
    convert(tmp_path / "x.npy", tmp_path / "b.mdb")
    assert values(tmp_path / "b.mdb") == values(tmp_path / "a.mdb")
    only(tmp_path, "x.npy", "a.mdb", "b.mdb")


def test_somebody_else_makes_the_file_meanwhile(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", sources.array(5))
    dest = tmp_path / "a.mdb"
    with (
        faults.inject("data.convert", lambda **_: dest.write_bytes(b"theirs")),
        pytest.raises(ConfigError, match="made by somebody else"),
    ):
        convert(tmp_path / "x.npy", dest)
    assert dest.read_bytes() == b"theirs"
    only(tmp_path, "x.npy", "a.mdb")


def test_a_disk_that_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 2**18)
    np.save(tmp_path / "x.npy", np.zeros((1000, 5000), np.uint8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, hard))
    try:
        with pytest.raises(DataError, match=r"a\.mdb: cannot be written: "):
            convert(tmp_path / "x.npy", tmp_path / "a.mdb")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    only(tmp_path, "x.npy")


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", sources.array(5))

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        faults.inject("files", full),
        pytest.raises(DataError, match=r"No space left on device; \d+ MiB are free there"),
    ):
        convert(tmp_path / "x.npy", tmp_path / "a.mdb", force=True)


def test_without_py_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", sources.array(5))
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'sapwood\[data\]'"):
        convert(tmp_path / "x.npy", tmp_path / "a.mdb")
    only(tmp_path, "x.npy")


# -- how it is written --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [100, 3000, 9000])
def test_many_transactions_leave_records_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 2**18)
    rows = np.random.default_rng(0).integers(0, 255, (1500, width), np.uint8)
    np.save(tmp_path / "x.npy", rows)
    done = convert(tmp_path / "x.npy", tmp_path / "a.mdb")
    index = build_index(tmp_path / "a.mdb", thorough=True)
    assert index.fingerprint.txnid > 2
    pages = index.offsets // index.page_size
    # A value of one page may go where a commit has left a page free.
    assert (np.diff(pages) < 0).sum() <= index.fingerprint.txnid
    needed = -(-(width + 16) // 4096) * 4096 if width > 2000 else width + 32
    assert done.file_bytes < 1.2 * 1500 * needed + 2**18
    assert values(tmp_path / "a.mdb") == [row.tobytes() for row in rows]


def test_a_record_larger_than_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 2**16)
    sizes = [10, 2**22, 5, 2**17, 2**24, 0]
    (tmp_path / "in").mkdir()
    for n, size in enumerate(sizes):
        (tmp_path / f"in/{n}.png").write_bytes(bytes([n]) * size)
    convert(tmp_path / "in", tmp_path / "a.mdb")
    assert values(tmp_path / "a.mdb") == [bytes([n]) * size for n, size in enumerate(sizes)]
