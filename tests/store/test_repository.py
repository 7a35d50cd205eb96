"""Saving, loading and opening models; the public interface on a folder and in memory."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from sapwood.errors import (
    BadName,
    ConfigError,
    Damaged,
    DoesNotFit,
    ModelExists,
    ModelNotFound,
    StoreError,
)
from sapwood.store import Repository
from sapwood.store import open as open_repository
from tests.repository.providers.clusters import Cluster


@pytest.fixture(params=["folder", "memory", "shared", "cluster"])
def repo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    if request.param == "cluster":
        cluster = Cluster(3, replicas=2)
        with cluster.repository() as repository:
            yield repository
        cluster.close()
        return
    place = "memory:" if request.param == "memory" else tmp_path / "models"
    shared = request.param == "shared"
    with open_repository(place, shared=shared) as repository:
        yield repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def model(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Linear(width, 4))


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)


def packs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "packs").rglob("*") if path.is_file())


def test_a_model_comes_back_bit_for_bit(repo: Repository) -> None:
    saved, other = model(0), model(1)
    record = repo.save(saved, "nt3/run7@step-500", tags=["best"], metrics={"loss": 0.5})
    assert str(record.reference) == "nt3/run7@step-500"
    assert not same(saved, other)
    repo.load("nt3/run7@best", into=other)
    assert same(saved, other)


def test_a_state_dict_comes_back_without_a_module(repo: Repository) -> None:
    saved, other = model(0), model(1)
    repo.save(saved.state_dict(), "a@1")
    other.load_state_dict(repo.load("a"))
    assert same(saved, other)


def test_what_is_loaded_may_be_written_to(repo: Repository) -> None:
    repo.save({"w": torch.arange(5000.0)}, "a@1")
    first = repo.load("a")["w"]
    first.zero_()
    assert torch.equal(repo.load("a")["w"], torch.arange(5000.0))
    assert torch.equal(repo.open("a")["w"][:], torch.arange(5000.0))


def test_what_is_changed_after_a_save_is_not_in_it(repo: Repository) -> None:
    weights = torch.arange(5000.0)
    repo.save({"w": weights}, "a@1")
    weights.zero_()
    assert torch.equal(repo.load("a")["w"], torch.arange(5000.0))


def test_parts_are_loaded_by_pattern_module_and_name(repo: Repository) -> None:
    repo.save(model(), "a@1")
    assert list(repo.load("a", layers="0")) == ["0.weight", "0.bias"]
    assert list(repo.load("a", layers=["1.running*", "2.bias"])) == [
        "1.running_mean",
        "1.running_var",
        "2.bias",
    ]
    with pytest.raises(ModelNotFound, match=r"did you mean '0\.weight'"):
        repo.load("a", layers="0.weigth")


def test_a_part_goes_into_a_module_and_leaves_the_rest(repo: Repository) -> None:
    saved, other = model(0), model(1)
    repo.save(saved, "a@1")
    before = other[2].weight.detach().clone()
    repo.load("a", into=other, layers="0")
    assert torch.equal(other[0].weight, saved[0].weight)
    assert torch.equal(other[2].weight, before)


def test_everything_that_does_not_fit_is_listed_and_nothing_changed(repo: Repository) -> None:
    repo.save(model(0), "a@1")
    other = model(1, width=7)
    other[2] = other[2].half()
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(DoesNotFit) as caught:
        repo.load("a", into=other)
    text = str(caught.value)
    assert "0.weight: shape [8, 1, 3, 3] is stored, [7, 1, 3, 3] is here" in text
    assert "2.bias: dtype float32 is stored, float16 is here" in text
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_missing_and_additional_tensors_are_told_apart(repo: Repository) -> None:
    repo.save(model(0), "a@1")
    longer = nn.Sequential(*model(1), nn.Linear(4, 4))
    with pytest.raises(DoesNotFit, match=r"3\.weight: missing in a@1"):
        repo.load("a", into=longer)
    repo.load("a", into=longer, strict=False)
    assert torch.equal(longer[0].weight, model(0)[0].weight)
    with pytest.raises(DoesNotFit, match="not in what it is loaded into"):
        repo.load("a", into=nn.Sequential(*list(model(1))[:2]))


def test_dtypes_are_converted_on_request_only(repo: Repository) -> None:
    repo.save(model(0), "a@1")
    half = model(1).half()
    repo.load("a", into=half, cast=True)
    assert torch.equal(half[0].weight, model(0)[0].weight.half())


def test_tensors_can_be_loaded_into_tensors(repo: Repository) -> None:
    repo.save({"w": torch.arange(4.0), "b": torch.ones(2)}, "a@1")
    target = {"w": torch.zeros(4), "b": torch.zeros(2)}
    repo.load("a", into=target)
    assert torch.equal(target["w"], torch.arange(4.0))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
        torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    ],
    ids=str,
)  # fmt: skip
def test_every_dtype_comes_back(dtype: torch.dtype, repo: Repository) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    value = raw.view(dtype).reshape(2, -1)
    repo.save({"t": value, "empty": value[:0], "one": value[0, 0]}, "a@1")
    found = repo.load("a")
    assert found["t"].dtype == dtype
    assert torch.equal(found["t"].view(torch.uint8), value.view(torch.uint8))
    assert found["empty"].shape == value[:0].shape
    assert found["one"].shape == ()


def test_odd_layouts_come_back_as_the_values_they_had(repo: Repository) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    value = {
        "transposed": base.transpose(0, 2),
        "sliced": base[:, ::2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels": torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last),
        "conj": torch.tensor([1 + 2j]).conj(),
        "negative": torch._neg_view(torch.arange(3.0)),
    }
    repo.save(value, "a@1")
    found = repo.load("a")
    for name, tensor in value.items():
        assert torch.equal(found[name], tensor), name


def test_tied_weights_are_stored_once_and_stay_tied(repo: Repository) -> None:
    tied = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    tied[1].weight = tied[0].weight
    assert repo.save(tied, "a@1").nbytes == 50 * 50 * 4
    found = repo.load("a")
    assert found["0.weight"] is found["1.weight"]
    fresh = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    fresh.load_state_dict(found)
    assert torch.equal(fresh[0].weight, fresh[1].weight)


def test_extra_state_of_modules_is_kept_and_given_back(repo: Repository) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    one, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    one[0].count = 7
    repo.save(one, "a@1")
    repo.load("a", into=other)
    assert other[0].count == 7


def test_a_tensor_can_be_read_in_part(repo: Repository) -> None:
    value = torch.arange(1000.0).reshape(10, 20, 5)
    repo.save({"t": value, "s": torch.tensor(3.0)}, "a@1")
    stored = repo.open("a")["t"]
    assert stored.shape == value.shape
    assert len(stored) == 10
    for index in (
        3, -1, slice(2, 5), slice(None), slice(7, 2), slice(1, 9, 3), (slice(2, 4), 1), (0, ..., 2),
        ..., None, [1, 3], torch.tensor([0, 9]), (slice(-3, None), slice(None), 2), True,
    ):  # fmt: skip
        assert torch.equal(stored[index], value[index]), index
    assert repo.open("a")["s"][()].item() == 3.0
    with pytest.raises(IndexError):
        stored[10]
    with pytest.raises(ModelNotFound, match="did you mean"):
        repo.open("a")["tt"]


def test_only_what_is_asked_for_is_read(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.save({"t": torch.arange(1000.0).reshape(100, 10)}, "a@1")
    stored = repo.open("a")
    asked = 0
    read = repo._backend.read

    def counted(parts):  # type: ignore[no-untyped-def]
        nonlocal asked
        asked += sum(len(part.out) for part in parts)
        read(parts)

    monkeypatch.setattr(repo._backend, "read", counted)
    assert torch.equal(stored["t"][10:12, 3], torch.tensor([103.0, 113.0]))
    assert asked == 2 * 10 * 4


def test_a_version_never_changes(repo: Repository) -> None:
    repo.save({"w": torch.zeros(3)}, "a@1")
    with pytest.raises(ModelExists):
        repo.save({"w": torch.ones(3)}, "a@1")
    assert repo.load("a@1")["w"].sum() == 0


def test_frozen_layers_of_a_child_take_no_room(folder: Path) -> None:
    with open_repository(folder) as repo:
        net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
        repo.save(net, "a@1")
        first = sum(path.stat().st_size for path in packs(folder))
        with torch.no_grad():
            net[1].bias += 1
        repo.save(net, "a@2", parent="a@1")
        assert sum(path.stat().st_size for path in packs(folder)) - first == 300 * 4
        net[0].weight.data[0, 0] += 1  # which no version counter sees
        repo.save(net, "a@3", parent="a@2")
        assert torch.equal(repo.load("a@3")["0.weight"], net[0].weight)
        assert not torch.equal(repo.load("a@2")["0.weight"], net[0].weight)


def test_equal_tensors_of_strangers_are_kept_once(folder: Path) -> None:
    with open_repository(folder) as repo:
        weights = torch.randn(1000)
        repo.save({"w": weights}, "a@1")
        repo.save({"other": weights.clone(), "x": torch.zeros(1)}, "b@1")
        repo.flush()
        swept = repo.gc(quiet=0)
        assert swept.live == 4000 + 4
        assert torch.equal(repo.load("b")["other"], weights)
        repo.remove("a@1")
        repo.gc(quiet=0)
        assert torch.equal(repo.load("b")["other"], weights)
        assert repo.verify().problems == []
    assert sum(path.stat().st_size for path in packs(folder)) < 4200


def test_gc_frees_what_was_removed_and_nothing_else(folder: Path) -> None:
    with open_repository(folder) as repo:
        for version in range(4):
            repo.save({"w": torch.full((10_000,), float(version))}, f"a@{version}")
        mapped = repo.load("a@1")
        repo.remove("a@1")
        swept = repo.gc(quiet=0)
        assert (swept.packs, swept.freed) == (1, 40_000)
        assert mapped["w"].sum() == 10_000
        assert repo.load("a@2")["w"][0] == 2
        assert repo.gc(quiet=0).packs == 0
        with pytest.raises(ModelNotFound):
            repo.load("a@1")


def test_a_pack_that_is_mostly_unused_is_written_anew(folder: Path) -> None:
    with open_repository(folder) as repo:
        base = {"keep": torch.randn(1000), "drop": torch.randn(100_000)}
        repo.save(base, "a@1")
        repo.save({"keep": base["keep"]}, "b@1", parent="a@1")
        repo.remove("a@1")
        repo.gc(quiet=0)
        assert sum(path.stat().st_size for path in packs(folder)) == 4000
        assert torch.equal(repo.load("b")["keep"], base["keep"])
        assert repo.verify().problems == []


def test_damage_is_found_and_named(folder: Path) -> None:
    with open_repository(folder) as repo:
        repo.save({"conv.w": torch.arange(1000.0)}, "a@1")
        repo.flush()
        (pack,) = packs(folder)
        with pack.open("r+b") as file:
            file.seek(17)
            file.write(b"\xff")
        problems = repo.verify().problems
        assert len(problems) == 1
        assert "a@1 conv.w" in problems[0]
        os.truncate(pack, 100)
        with pytest.raises(Damaged, match="truncated"):
            repo.load("a@1")
        pack.unlink()
        with pytest.raises(Damaged, match="missing"):
            repo.load("a@1")
        assert "a@1 conv.w" in repo.verify().problems[0]


@pytest.mark.parametrize("name", ["", "../a", "a@..", "a b@1", "/a", "a@1@2"])
def test_bad_names_are_refused_before_anything_is_written(name: str, folder: Path) -> None:
    with open_repository(folder) as repo:
        with pytest.raises(BadName):
            repo.save({"w": torch.ones(1)}, name)
        assert packs(folder) == []


def test_what_cannot_be_saved_saves_nothing(folder: Path) -> None:
    with open_repository(folder) as repo:
        with pytest.raises(StoreError, match=r"\['f'\] is a builtins.object"):
            repo.save({"w": torch.ones(1), "f": object()}, "a@1")
        with pytest.raises(ModelNotFound):
            repo.save({"w": torch.ones(1)}, "a@1", parent="b@1")
        with pytest.raises(ConfigError):
            repo.save({"w": torch.ones(1)}, "a@1", metrics={"loss": "low"})  # type: ignore[dict-item]
        with pytest.raises(StoreError, match="NaN"):
            repo.save({"w": torch.ones(1)}, "a@1", metrics={"loss": float("nan")})
        with pytest.raises(ConfigError, match="'synced'"):
            repo.save({"w": torch.ones(1)}, "a@1", durability="forever")
        assert packs(folder) == []
        assert repo.models() == []


def test_lineage_and_differences(repo: Repository) -> None:
    net = model(0)
    repo.save(net, "a@1")
    with torch.no_grad():
        net[0].weight += 0.5
    repo.save(net, "a@2", parent="a@1")
    repo.save({"0.weight": torch.zeros(2)}, "b@1", parent="a@2")
    assert [str(r.reference) for r in repo.log("b")] == ["b@1", "a@2", "a@1"]
    assert [str(r.reference) for r in repo.children("a@1")] == ["a@2"]
    changes = {change.name: change for change in repo.diff("a@1", "a@2")}
    assert changes["0.weight"].kind == "changed"
    assert changes["0.weight"].largest == pytest.approx(0.5, abs=1e-6)
    assert {c.kind for n, c in changes.items() if n != "0.weight"} == {"same"}
    kinds = {change.name: change.kind for change in repo.diff("a@1", "b@1")}
    assert kinds["0.weight"] == "reshaped"
    assert kinds["2.bias"] == "removed"


def test_several_threads_save_and_load(repo: Repository) -> None:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for version in range(5):
                value = torch.full((1000,), float(10 * number + version))
                repo.save({"w": value}, f"m{number}@{version}")
                assert torch.equal(repo.load(f"m{number}@{version}")["w"], value)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(repo.models()) == 20
    assert repo.verify().problems == []


SAVER = """
import sys, torch
from sapwood.store import open
repo = open(sys.argv[1])
for n in range(10**6):
    repo.save({"a": torch.full((20000,), float(n)), "b": torch.arange(100.0)}, f"m@{n}")
    print(n, flush=True)
"""


@pytest.mark.parametrize("saves", [1, 4])
def test_a_killed_saver_leaves_nothing_half_saved(saves: int, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SAVER, str(folder)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(saves):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with open_repository(folder) as repo:
        records = repo.models("m")
        assert len(records) >= saves
        for record in records:
            found = repo.load(str(record.reference))
            assert found["a"].unique().tolist() == [float(record.version)]
        repo.gc(quiet=0)
        assert repo.verify().problems == []
        known = sum(row.nbytes for row in repo._backend.catalog.packs())  # type: ignore[attr-defined]
    assert sum(path.stat().st_size for path in packs(folder)) == known
    assert not list((folder / ".drafts").glob("*"))


def test_two_processes_share_a_folder(folder: Path) -> None:
    with open_repository(folder) as repo:
        repo.save({"w": torch.ones(10)}, "a@1")
        script = (
            "import sys, torch; from sapwood.store import open\n"
            "with open(sys.argv[1]) as r:\n"
            "    assert r.load('a')['w'].sum() == 10\n"
            "    r.save({'w': torch.zeros(3)}, 'b@1', parent='a@1')\n"
        )
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(folder)], check=True, timeout=60
        )
        assert repo.load("b")["w"].tolist() == [0, 0, 0]


def test_a_forked_reader_opens_its_own_connection(folder: Path) -> None:
    with open_repository(folder) as repo:
        repo.save({"w": torch.ones(10)}, "a@1")
        repo.flush()
        child = os.fork()
        if not child:
            try:
                os._exit(0 if repo.load("a")["w"].sum() == 10 else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_foreign_folder_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        open_repository(tmp_path)
    with pytest.raises(ConfigError, match="create=True"):
        open_repository(tmp_path / "new", create=False)
    with pytest.raises(ConfigError, match="expected a folder"):
        open_repository("http://example.org/x")


def test_a_closed_repository_says_so(folder: Path) -> None:
    repo = open_repository(folder)
    repo.close()
    repo.close()
    with pytest.raises(StoreError, match="closed"):
        repo.models()
