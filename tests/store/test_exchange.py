"""Models from files and to files: byte for byte where that can be, and refused where it cannot."""

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.torch as st
import torch
from torch import nn

from sapwood.errors import BadName, ConfigError, Damaged, ModelNotFound, StoreError
from sapwood.store import Repository
from sapwood.store import open as open_repository
from sapwood.store.exchange import as_folder, read_model, write_model

ODD = {
    "f64": torch.arange(3, dtype=torch.float64),
    "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "f16": torch.arange(5, dtype=torch.float16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False, True]),
    "c64": torch.tensor([1 + 2j]),
    "u16": torch.tensor([1, 2, 3], dtype=torch.uint16),
    "u32": torch.tensor([1, 2, 3], dtype=torch.uint32),
    "u64": torch.tensor([1, 2, 3], dtype=torch.uint64),
    "i8": torch.arange(3, dtype=torch.int8),
    "packed.int4": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
    "e4m3": torch.arange(3).to(torch.float8_e4m3fn),
    "e5m2": torch.arange(3).to(torch.float8_e5m2),
    "e4m3fnuz": torch.arange(3).to(torch.float8_e4m3fnuz),
    "e5m2fnuz": torch.arange(3).to(torch.float8_e5m2fnuz),
    "e8m0": torch.arange(3, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "f4": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 2),
    'name "with" ü\n'.strip(): torch.ones(1),
}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with open_repository(tmp_path / "models") as repository:
        yield repository


Put = Callable[..., None]


@pytest.fixture
def put(repo: Repository) -> Put:
    def save(path: Path, name: str, **options: object) -> None:
        found = read_model(path, **options)  # type: ignore[arg-type]
        repo.save(found.value, name, note=found.note, files=found.files)

    return save


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def hugging_face(folder: Path, *, shards: int = 1) -> dict[str, torch.Tensor]:
    """A folder as transformers writes one."""
    folder.mkdir()
    state = {f"layer.{i}.weight": torch.randn(4, i + 1) for i in range(6)}
    names = list(state)
    files = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = names[shard::shards]
        file = "model.safetensors" if shards == 1 else file
        st.save_file({name: state[name] for name in held}, folder / file, {"format": "pt"})
        files.update(dict.fromkeys(held, file))
    if shards > 1:
        index = {"metadata": {"total_size": 1, "odd": "kept"}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=3))
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_bytes(bytes(range(256)))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return state


def test_every_dtype_goes_in_and_comes_out_byte_for_byte(
    repo: Repository, put: Put, tmp_path: Path
) -> None:
    file = tmp_path / "odd.safetensors"
    st.save_file(ODD, file, {"format": "pt"})
    put(file, "odd@1")
    for name, tensor in repo.load("odd@1").items():
        assert (tensor.dtype, tensor.shape) == (ODD[name].dtype, ODD[name].shape)
        assert bits(tensor) == bits(ODD[name])
    write_model(repo.open("odd@1"), tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == file.read_bytes()


def test_metadata_comes_back(repo: Repository, put: Put, tmp_path: Path) -> None:
    st.save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors", {"format": "np", "by": "me"})
    put(tmp_path / "m.safetensors", "m@1")
    write_model(repo.open("m@1"), tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "np", "by": "me"}
        assert file.get_slice("a")[:1].tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_what_the_format_cannot_hold_is_refused(
    dtype: torch.dtype, repo: Repository, tmp_path: Path
) -> None:
    repo.save({"a": torch.zeros(2, dtype=torch.complex64).view(torch.uint8).view(dtype)}, "c@1")
    with pytest.raises(StoreError, match=r"complex.*which safetensors files cannot hold"):
        write_model(repo.open("c@1"), tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*out*"))
    write_model(repo.open("c@1"), tmp_path / "out.pt")
    assert (tmp_path / "out.pt").exists()


def test_an_odd_f4_of_a_file_is_refused(put: Put, tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    st.save_file({"a": ODD["f4"]}, file)
    file.write_bytes(file.read_bytes().replace(b"[3,4]", b"[4,3]"))
    with pytest.raises(Damaged, match="torch holds pairs"):
        put(file, "f@1")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_there_under_each_name(repo: Repository, tmp_path: Path) -> None:
    model = Tied()
    repo.save(model, "tied@1")
    write_model(repo.open("tied@1"), tmp_path / "out.safetensors")
    other = Tied()
    other.load_state_dict(st.load_file(tmp_path / "out.safetensors"))
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight


def test_names_that_a_file_says_are_tied_come_back_tied(
    repo: Repository, put: Put, tmp_path: Path
) -> None:
    model = Tied()
    st.save_model(model, str(tmp_path / "m.safetensors"))
    put(tmp_path / "m.safetensors", "tied@1")
    other = Tied()
    repo.load("tied@1", into=other)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert repo.info("tied@1").nbytes == model.head.weight.nbytes
    write_model(repo.open("tied@1"), tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").stat().st_size < 2 * model.head.weight.nbytes + 120
    assert st.load_model(Tied(), tmp_path / "out.safetensors") == (set(), [])


def test_importing_holds_no_copy_of_the_file(put: Put, tmp_path: Path) -> None:
    size = 64 * 2**20
    text = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}})
    # An odd length, as old files have it, so that no tensor is aligned.
    text = text.ljust(len(text) // 8 * 8 + 9)
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text.encode())
        file.truncate(8 + len(text) + size)
    tracemalloc.start()
    try:
        put(tmp_path / "large.safetensors", "large@1")
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_comes_back_byte_for_byte(
    shards: int, repo: Repository, put: Put, tmp_path: Path
) -> None:
    state = hugging_face(tmp_path / "hf", shards=shards)
    put(tmp_path / "hf", "hf@1")
    assert set(repo.load("hf@1")) == set(state)
    assert repo.open("hf@1").file("config.json") == b'{"model_type": "none"}'
    write_model(repo.open("hf@1"), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "hf")
    assert repo.verify().problems == []


def test_files_that_do_not_change_take_no_room(repo: Repository, tmp_path: Path) -> None:
    files = {"config.json": b"x" * 5000}
    repo.save({"a": torch.ones(3)}, "m@1", files=files)
    repo.save({"a": torch.zeros(3)}, "m@2", parent="m@1", files=files)
    one, two = repo.open("m@1"), repo.open("m@2")
    assert one.file_row("config.json").blob == two.file_row("config.json").blob
    repo.remove("m@1")
    repo.gc(quiet=0)
    assert two.file("config.json") == files["config.json"]
    assert repo.load("m@2")["a"].tolist() == [0, 0, 0]
    assert list(two.value()) == ["a"]


def test_weights_can_be_split_anew(repo: Repository, put: Put, tmp_path: Path) -> None:
    state = hugging_face(tmp_path / "hf", shards=2)
    put(tmp_path / "hf", "hf@1")
    write_model(repo.open("hf@1"), tmp_path / "out", shard_bytes=100)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    for name, file in index["weight_map"].items():
        found = st.load_file(tmp_path / "out" / file)
        assert torch.equal(found[name], state[name])
        assert len(found) == 1 or sum(t.nbytes for t in found.values()) <= 100
    write_model(repo.open("hf@1"), tmp_path / "one", shard_bytes=10**9)
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    assert set(st.load_file(tmp_path / "one/model.safetensors")) == set(state)


def test_weights_keep_the_name_they_had(repo: Repository, put: Put, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    st.save_file({"a": torch.ones(2)}, tmp_path / "lora/adapter_model.safetensors")
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    put(tmp_path / "lora", "lora@1")
    assert set(as_folder(repo.open("lora@1"))) == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }


def test_a_folder_of_torch_files_is_read(repo: Repository, put: Put, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "one.bin")
    torch.save({"b": torch.zeros(2)}, folder / "two.bin")
    index = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    found = read_model(folder)
    assert any("is left out" in line for line in found.said)
    put(folder, "old@1")
    assert set(as_folder(repo.open("old@1"))) == {"model.safetensors", "config.json"}
    torch.save(nn.Linear(1, 1), folder / "two.bin")
    with pytest.raises(StoreError, match="without running code"):
        put(folder, "old@2")


def test_other_weights_of_a_folder_are_not_taken_for_tensors(put: Put, tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    st.save_file({"layer.0.weight": torch.ones(1)}, tmp_path / "hf/other.safetensors")
    found = read_model(tmp_path / "hf")
    assert found.value["layer.0.weight"].shape == (4, 1)
    assert "other.safetensors" in found.files
    with (tmp_path / "hf/other.safetensors").open("r+b") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(ConfigError, match=r"at most 268435456; leave it out: --without 'other"):
        put(tmp_path / "hf", "hf@1")
    assert "other.safetensors" not in read_model(tmp_path / "hf", without=["other*"]).files


def test_what_tools_keep_in_a_folder_is_left_out_and_said(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf/.git").mkdir()
    (tmp_path / "hf/.git/config").write_text("secret")
    (tmp_path / "hf/.gitattributes").write_text("kept")
    found = read_model(tmp_path / "hf")
    assert ".git/config" not in found.files
    assert ".gitattributes" in found.files
    assert any(".git is left out" in line for line in found.said)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), "which is not there"),
        (lambda f: _weight_map(f, {"nothing": "model-00001-of-00003.safetensors"}), "in no file"),
        (lambda f: _weight_map(f, {"a": "../x"}), "not a file of this folder"),
        (lambda f: _weight_map(f, {"a": ""}), "not a file of this folder"),
        (lambda f: _weight_map(f, {"a": ".."}), "not a file of this folder"),
        (lambda f: _weight_map(f, {"a": "config.json"}), "expected files that end in"),
        (lambda f: _weight_map(f, ["a"]), "not a sound index"),
        (lambda f: os.mkfifo(f / "fifo"), "is a FIFO"),
        (lambda f: (f / "b\nc").write_text(""), "is no name of a file"),
        (lambda f: (f / "b.safetensors.index.json").symlink_to("/nowhere"), "cannot read"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(
    spoil: Callable[[Path], None], said: str, put: Put, tmp_path: Path
) -> None:
    hugging_face(tmp_path / "hf", shards=3)
    spoil(tmp_path / "hf")
    with pytest.raises((StoreError, Damaged, BadName), match=said):
        put(tmp_path / "hf", "hf@1")


def _weight_map(folder: Path, content: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": content}))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../a": b""}, "is no name of a file"),
        ({"/a": b""}, "is no name of a file"),
        ({"a//b": b""}, "is no name of a file"),
        ({"a\\b": b""}, "is no name of a file"),
        ({"C:a": b""}, "is no name of a file"),
        ({"a\0": b""}, "is no name of a file"),
        ({"": b""}, "is no name of a file"),
        ({"model.safetensors": b""}, "cannot be called"),
        ({"a": b"", "a/b": b""}, "is a file, and a folder"),
        ({"a": "text"}, "is a str, expected bytes"),
        ({str(i): b"" for i in range(1001)}, "expected 1000"),
    ],
)
def test_files_that_cannot_be_kept_are_refused(
    files: dict[str, bytes], said: str, repo: Repository
) -> None:
    with pytest.raises((ConfigError, BadName), match=said):
        repo.save({"a": torch.ones(1)}, "m@1", files=files)
    assert repo.models() == []


def test_an_unknown_file_says_what_is_like_it(repo: Repository) -> None:
    repo.save({"a": torch.ones(1)}, "m@1", files={"config.json": b"{}"})
    with pytest.raises(ModelNotFound, match=r"did you mean 'config.json'"):
        repo.open("m@1").file("confg.json")


def test_nothing_is_overwritten_and_nothing_half_is_left(repo: Repository, tmp_path: Path) -> None:
    repo.save({"a": torch.ones(1)}, "m@1")
    stored = repo.open("m@1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="never overwritten"):
        write_model(stored, tmp_path / "full")
    write_model(stored, tmp_path / "empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="expected a file that ends in"):
        write_model(stored, tmp_path / "out.onnx")
    with pytest.raises(ConfigError, match="to split the weights, name a folder"):
        write_model(stored, tmp_path / "out.pt", shard_bytes=10)
    with pytest.raises(StoreError, match="cannot write"):
        write_model(stored, tmp_path / "nowhere/out")
    repo.save({"a": torch.ones(1)}, "m@2", files={"sub/x": b"1"})
    repo.remove("m@2")
    assert not [path for path in tmp_path.iterdir() if "draft" in path.name]


def test_a_note_of_the_user_decides_nothing_dangerous(repo: Repository, tmp_path: Path) -> None:
    for number, weights in enumerate(["../../x.safetensors", 5, "x", "a\nb.safetensors", None]):
        note = {"weights": weights, "metadata": {"a": 1}}
        repo.save({"a": torch.ones(1)}, f"m@{number}", note=note)
        assert list(as_folder(repo.open(f"m@{number}"))) == ["model.safetensors"]


def test_names_no_safetensors_file_can_have_are_refused(repo: Repository, tmp_path: Path) -> None:
    repo.save({"__metadata__": torch.ones(1)}, "m@1")
    with pytest.raises(StoreError, match="can be called '__metadata__'"):
        write_model(repo.open("m@1"), tmp_path / "out.safetensors")


def test_ranges_are_those_of_the_whole(repo: Repository, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"{i}": torch.randn(i % 7, 5) for i in range(40)}
    repo.save({**state, "large": torch.randn(3 * 2**20)}, "m@1")
    (file,) = as_folder(repo.open("m@1")).values()
    whole = b"".join(map(bytes, file.blocks(0, file.size)))
    assert len(whole) == file.size
    edges = [0, 1, 8, 1500, 3000, 4 * 2**20, 4 * 2**20 + 1, 8 * 2**20, file.size - 1, file.size]
    for start in edges:
        for stop in edges:
            if start <= stop:
                assert b"".join(map(bytes, file.blocks(start, stop))) == whole[start:stop]


def test_links_to_folders_are_left_out_and_said(put: Put, tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf/round").symlink_to(tmp_path / "hf")
    (tmp_path / "hf/linked.json").symlink_to(tmp_path / "hf/config.json")
    found = read_model(tmp_path / "hf")
    assert bytes(found.files["linked.json"]) == b'{"model_type": "none"}'
    assert any("round is left out" in line for line in found.said)
    assert not any(name.startswith("round") for name in found.files)


@pytest.mark.parametrize(
    "places", [{"a": "config.bin"}, {"a": "../x.safetensors"}, {"b": "x.safetensors"}, {}, [], None]
)
def test_an_index_that_says_nothing_of_these_tensors_is_only_a_file(
    places: object, repo: Repository
) -> None:
    index = json.dumps({"weight_map": places}).encode()
    repo.save({"a": torch.ones(1)}, "m@1", files={"model.safetensors.index.json": index})
    table = as_folder(repo.open("m@1"))
    assert set(table) == {"model.safetensors", "model.safetensors.index.json"}


def test_two_files_of_one_name_are_refused(repo: Repository) -> None:
    index = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()
    files = {"model.safetensors.index.json": index, "x.safetensors": b"another"}
    repo.save({"a": torch.ones(1)}, "m@1", files=files)
    with pytest.raises(StoreError, match=r"keeps a file x.safetensors, which is also"):
        as_folder(repo.open("m@1"))


def test_a_model_without_tensors_is_a_file_that_can_be_read(
    repo: Repository, tmp_path: Path
) -> None:
    repo.save({}, "m@1")
    write_model(repo.open("m@1"), tmp_path / "out.safetensors")
    assert st.load_file(tmp_path / "out.safetensors") == {}


def test_the_folder_one_is_in_is_not_replaced(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.save({"a": torch.ones(1)}, "m@1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", "..", str(tmp_path / "here")):
        with pytest.raises(ConfigError, match="name one below"):
            write_model(repo.open("m@1"), Path(path))
