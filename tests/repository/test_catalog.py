"""The catalog: versions, tags, lineage, counted references, and equal tensors."""

import json
import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sapwood.errors import Damaged, Gone, ModelExists, ModelNotFound, StoreError
from sapwood.repository.base import ModelRecord, NewModel
from sapwood.repository.catalog import Catalog, NewPack
from sapwood.repository.database import Database
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference, new_id, parse


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(Database(tmp_path / "catalog.db"))


def manifest(*blobs: int) -> Manifest:
    return Manifest(
        dtypes=("uint8",) * len(blobs),
        shapes=((8,),) * len(blobs),
        blobs=blobs,
        names=tuple((f"t{n}", n) for n in range(len(blobs))),
        structure=None,
    )


def add(
    catalog: Catalog, text: str, *shared: int, new: int = 1, key: str = "", **more: object
) -> ModelRecord:
    reference = parse(text)
    pack = NewPack(key=key or f"p-{text}", nbytes=64 * new, blobs=[(64 * n, 8) for n in range(new)])
    blobs = [*shared, *(-2 - n for n in range(new))]
    model = NewModel(
        name=reference.name, version=reference.version, manifest=manifest(*blobs), **more
    )  # type: ignore[arg-type]
    return catalog.add(model, pack if new else None)


def blobs_of(catalog: Catalog, text: str) -> tuple[int, ...]:
    return catalog.manifest(parse(text))[1].blobs


def test_a_version_never_changes(catalog: Catalog) -> None:
    add(catalog, "a@1")
    with pytest.raises(ModelExists, match="a@1 is there already"):
        add(catalog, "a@1", key="other")
    assert len(catalog.models()) == 1


def test_a_bare_name_is_the_latest(catalog: Catalog) -> None:
    add(catalog, "a@9")
    add(catalog, "a@3")
    assert catalog.find(parse("a")).version == "3"
    assert add(catalog, "a").version == "10"
    assert catalog.find(parse("a")).version == "10"


def test_a_number_is_not_given_twice(catalog: Catalog) -> None:
    add(catalog, "a")
    catalog.remove(parse("a@1"))
    assert add(catalog, "a", key="again").version == "2"


def test_a_removed_version_may_be_saved_again(catalog: Catalog) -> None:
    first = add(catalog, "a@x")
    catalog.remove(parse("a@x"))
    again = add(catalog, "a@x", key="again")
    assert again.id != first.id
    assert catalog.by_id(first.id, "a").removed is not None


def test_tags_move_and_are_no_versions(catalog: Catalog) -> None:
    add(catalog, "a@1", tags=["best"])
    add(catalog, "a@2")
    assert catalog.find(parse("a@best")).version == "1"
    catalog.tag(parse("a@2"), "best")
    assert catalog.find(parse("a@best")).version == "2"
    assert catalog.find(parse("a@1")).tags == ()
    with pytest.raises(ModelExists):
        catalog.tag(parse("a@2"), "1")
    with pytest.raises(ModelExists):
        add(catalog, "a@best", key="other")
    catalog.untag("a", "best")
    with pytest.raises(ModelNotFound):
        catalog.untag("a", "best")


def test_what_is_not_there_says_what_is_alike(catalog: Catalog) -> None:
    add(catalog, "nt3/run7@step-500")
    with pytest.raises(ModelNotFound, match="did you mean 'nt3/run7'"):
        catalog.find(parse("nt3/run8"))
    with pytest.raises(ModelNotFound, match="did you mean 'step-500'"):
        catalog.find(parse("nt3/run7@step-50"))


def test_shared_blobs_live_as_long_as_one_model_needs_them(catalog: Catalog) -> None:
    add(catalog, "parent@1", new=2)
    old = blobs_of(catalog, "parent@1")
    add(catalog, "child@1", old[0], new=1)
    catalog.remove(parse("parent@1"))
    assert catalog.places([old[0]])[old[0]].pack == "p-parent@1"
    with pytest.raises(Gone):
        catalog.places([old[1]])
    catalog.remove(parse("child@1"))
    with pytest.raises(Gone):
        catalog.places([old[0]])


def test_sharing_what_was_removed_saves_nothing(catalog: Catalog) -> None:
    add(catalog, "parent@1")
    old = blobs_of(catalog, "parent@1")
    catalog.remove(parse("parent@1"))
    with pytest.raises(Gone):
        add(catalog, "child@1", *old, new=1)
    assert catalog.models() == []


def test_equal_tensors_are_merged(catalog: Catalog) -> None:
    for name in "abc":
        add(catalog, f"{name}@1")
    a, b, c = (blobs_of(catalog, f"{name}@1")[0] for name in "abc")
    assert [place.blob for place in catalog.unhashed()] == [a, b, c]
    assert catalog.hashed([(a, b"same", b"m")]) == 0
    assert catalog.hashed([(b, b"same", b"m"), (c, b"other", b"m")]) == 8
    assert catalog.unhashed() == []
    assert catalog.places([b])[b].pack == "p-a@1"
    catalog.remove(parse("a@1"))
    assert catalog.places([b])[b].pack == "p-a@1"
    catalog.remove(parse("b@1"))
    with pytest.raises(Gone):
        catalog.places([a])


def test_digests_of_what_is_gone_are_passed_over(catalog: Catalog) -> None:
    add(catalog, "a@1")
    (blob,) = blobs_of(catalog, "a@1")
    catalog.remove(parse("a@1"))
    assert catalog.hashed([(blob, b"x", b"m"), (999, b"x", b"m")]) == 0


def test_lineage_outlives_removal(catalog: Catalog) -> None:
    first = add(catalog, "a@1")
    add(catalog, "a@2", parent=first.id, parent_name="a")
    catalog.remove(parse("a@1"))
    child = catalog.find(parse("a@2"))
    assert child.parent is not None
    assert child.parent_name == "a"
    assert catalog.by_id(child.parent, "a").version == "1"
    with pytest.raises(ModelNotFound, match="no version of number"):
        catalog.by_id(child.parent, "b")
    assert [c.version for c in catalog.children(first.id)] == ["2"]


def test_a_parent_may_be_in_another_catalog(catalog: Catalog) -> None:
    add(catalog, "a@2", parent=7, parent_name="elsewhere")
    assert catalog.find(parse("a")).parent_name == "elsewhere"
    assert [child.version for child in catalog.children(7)] == ["2"]


def test_numbers_grow_with_time_and_may_be_given(catalog: Catalog) -> None:
    ids = [add(catalog, f"a@v{n}").id for n in range(5)]
    assert ids == sorted(set(ids))
    assert 0 < ids[0] < ids[-1] < 2**63
    late = ids[-1] + 2**40
    assert add(catalog, "a@late", id=late).id == late
    assert add(catalog, "a@next").id == late + 1
    assert new_id(2**62) == 2**62 + 1


def test_metrics_and_notes_come_back(catalog: Catalog) -> None:
    add(catalog, "a@1", metrics={"loss": 0.5, "acc": 1}, note={"run": "x"})
    found = catalog.find(parse("a@1"))
    assert found.metrics == {"acc": 1.0, "loss": 0.5}
    assert found.note == {"run": "x"}


def test_a_foreign_or_newer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_bytes(b"hello " * 100)
    with pytest.raises(Damaged, match="damaged"):
        Database(tmp_path / "text.db")
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(StoreError, match="version 99"):
        Database(tmp_path / "newer.db")


def test_a_closed_catalog_says_so(tmp_path: Path) -> None:
    database = Database(tmp_path / "c.db")
    database.close()
    database.close()
    with pytest.raises(StoreError, match="closed"):
        Catalog(database).models()


def test_a_forked_process_has_a_connection_of_its_own(tmp_path: Path) -> None:
    catalog = Catalog(Database(tmp_path / "c.db"))
    add(catalog, "a@1")
    child = os.fork()
    if not child:
        try:
            add(catalog, "b@1")
            os._exit(0 if catalog.find(parse("a@1")).version == "1" else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    add(catalog, "c@1")
    assert [record.name for record in catalog.models()] == ["a", "b", "c"]


class Counting(RuleBasedStateMachine):
    """Saves, removals and merges in any order keep every count right."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.database = Database(Path(self.folder.name) / "c.db")
        self.catalog = Catalog(self.database)
        self.content: dict[int, bytes] = {}
        self.alive: dict[str, tuple[int, ...]] = {}
        self.count = 0

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    @rule(new=st.lists(st.sampled_from([b"x", b"y", b"z"]), max_size=3), share=st.integers(0, 3))
    def save(self, new: list[bytes], share: int) -> None:
        self.count += 1
        name = f"m{self.count}@1"
        known = sorted({blob for blobs in self.alive.values() for blob in blobs})
        add(self.catalog, name, *known[:share], new=len(new))
        blobs = blobs_of(self.catalog, name)
        self.alive[name] = blobs
        self.content.update(zip(blobs[len(known[:share]) :], new, strict=True))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.catalog.remove(parse(name))
        del self.alive[name]

    @rule(count=st.integers(1, 4))
    def hash_some(self, count: int) -> None:
        found = self.catalog.unhashed(count)
        self.catalog.hashed([(p.blob, self.content[p.blob], b"m") for p in found])

    @invariant()
    def every_model_has_its_bytes(self) -> None:
        for blobs in self.alive.values():
            places = self.catalog.places(blobs)
            assert set(places) == set(blobs)
        with self.database.reading() as db:
            for blob, refs, same_as in db.execute("SELECT id, refs, same_as FROM blob").fetchall():
                users = sum(blobs.count(blob) for blobs in self.alive.values())
                same = db.execute("SELECT count(*) FROM blob WHERE same_as = ?", (blob,))
                assert refs == users + same.fetchone()[0] > 0
                if same_as is not None:
                    assert self.content[same_as] == self.content[blob]
            for pack, live in db.execute("SELECT id, live FROM pack").fetchall():
                query = "SELECT coalesce(sum(nbytes), 0) FROM blob WHERE pack = ?"
                assert live == db.execute(query, (pack,)).fetchone()[0]


Counting.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
test_counts = Counting.TestCase


def test_a_hundred_thousand_rows_are_looked_up_by_index(catalog: Catalog) -> None:
    """The plan of the queries that every load makes has no scan of a table."""
    with catalog._database.reading() as db:
        query = (
            "EXPLAIN QUERY PLAN SELECT blob.id FROM blob WHERE id IN "
            "(SELECT value FROM json_each(?))"
        )
        plans = [row[3] for row in db.execute(query, (json.dumps([1]),))]
    assert not any(plan.startswith("SCAN blob") for plan in plans)


def test_references_are_compared_as_they_are(catalog: Catalog) -> None:
    add(catalog, "A@1")
    with pytest.raises(ModelNotFound):
        catalog.find(Reference("a", "1"))


def test_which_blobs_are_equal_is_known_once_they_are_hashed(catalog: Catalog) -> None:
    add(catalog, "a@1", new=2)
    add(catalog, "b@1", new=1)
    first, second, third = (place.blob for place in catalog.unhashed())
    assert catalog.canonical([first, second, third, -1, 999]) == {
        first: None,
        second: None,
        third: None,
    }
    catalog.hashed([(first, b"same", b""), (second, b"other", b""), (third, b"same", b"")])
    assert catalog.canonical([third, second, first]) == {
        first: first,
        second: second,
        third: first,
    }
    catalog.remove(parse("a@1"))  # what stands for others stays while they do
    assert catalog.canonical([first, second, third]) == {first: first, third: first}
