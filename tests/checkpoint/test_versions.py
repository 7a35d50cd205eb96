"""Checkpoints as versions of a model repository: whole, bit for bit, one graph with the runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
import sapwood.store
from sapwood.cli.main import main
from sapwood.errors import ConfigError, ModelNotFound
from sapwood.repository.names import parse
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.training import Training, make_model, same
from tests.clone.forking import home_of, order
from tests.sync import models

STEPS = 6
State = dict[str, torch.Tensor]


def store(folder: Path) -> str:
    return f"store://{folder / 'models'}"


def checkpointer(training: Training, folder: Path, **options: Any) -> sapwood.Checkpointer:
    tiers = options.pop("tiers", ("memory", store(folder)))
    return sapwood.Checkpointer(
        training.run, folder / "ckpts", tiers=tiers, **{"keep": None, **options}
    )


def train(folder: Path, mode: str, engine: str) -> tuple[list[float], State]:
    training = Training(folder)
    with checkpointer(training, folder, every=2, mode=mode, engine=engine) as c:
        losses = training.steps(STEPS)
        c.wait()
        assert all(set(save.durable) == {"memory", "store"} for save in c.stats.saves)
    state = training.state()
    training.close()
    return losses, state


def go_on(folder: Path, step: int, engine: str) -> tuple[list[float], State]:
    training = Training(folder)
    torch.manual_seed(77)
    with checkpointer(training, folder, tiers=(store(folder),), engine=engine) as c:
        assert c.restore(step).tiers == ("store",)
    losses = training.steps(STEPS)
    state = training.state()
    training.close()
    return losses, state


@pytest.mark.parametrize(
    ("world", "mode", "engine"),
    [(1, "lazy", "node"), (2, "backward", "node"), (2, "lazy", "sync"), (3, "single", "sync")],
)
def test_ranks_go_on_bit_for_bit(tmp_path: Path, world: int, mode: str, engine: str) -> None:
    trained = ranks.spawn(train, world, tmp_path, mode, engine)
    for (losses, state), (more, end) in zip(
        trained, ranks.spawn(go_on, world, tmp_path, 4, engine), strict=True
    ):
        assert losses[4:] == more
        assert same(state, end)
    assert [record.version for record in records(tmp_path)] == ["step-2", "step-4", "step-6"]
    assert hidden(tmp_path) == []


def restored(folder: Path) -> State:
    training = Training(folder)
    with checkpointer(training, folder, engine="sync") as c:
        assert c.restore_latest() is not None
    state = training.state()
    training.close()
    return {"rank": torch.tensor(rank()), **state}


def test_any_number_of_ranks_to_any_other(tmp_path: Path) -> None:
    expected = ranks.spawn(train, 2, tmp_path, "lazy", "node")[0][1]
    for world in (1, 3):
        for state in ranks.spawn(restored, world, tmp_path):
            shared = [name for name in expected if name != "random"]
            assert all(torch.equal(expected[name], state[name]) for name in shared)


def records(folder: Path, pattern: str = "*") -> list[Any]:
    with sapwood.store.open(folder / "models", create=False) as repo:
        return repo.models(pattern)


def hidden(folder: Path) -> list[str]:
    return [str(record.reference) for record in records(folder, ".*")]


# -- as models -------------------------------------------------------------------------------------


def test_weights_are_there_while_the_training_goes_on(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path, every=2) as c:
        training.steps(2)
        c.wait()
        saved = {n: t.clone() for n, t in training.model.state_dict().items()}
        with sapwood.store.open(tmp_path / "models", create=False) as repo:
            training.step()
            name = f"{training.run.id}@step-2"
            fresh = make_model(frozen=True)
            repo.load(name, into=fresh)
            value = repo.load(name)
            part = repo.load(name, layers="conv")
            head = repo.open(name)["head.weight"][1:3]
        training.step()
    assert all(torch.equal(saved[n], t) for n, t in fresh.state_dict().items())
    assert make_model(frozen=True).load_state_dict(value).missing_keys == []
    assert sorted(part) == ["conv.bias", "conv.weight"]
    assert torch.equal(head, saved["head.weight"][1:3])
    training.close()


def test_tied_weights_and_extra_state_are_there_under_every_name(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Tied()
    run = sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path / "runs")
    tiers = (store(tmp_path),)
    with sapwood.Checkpointer(run, tmp_path / "ckpts", tiers=tiers, engine="sync") as c:
        run.model(torch.arange(4)).sum().backward()
        run.step()
        c.save()
        with sapwood.store.open(tmp_path / "models") as repo:
            value = repo.load(run.id)
            other = Tied()
            other.note.text = "unknown"
            repo.load(run.id, into=other)
    assert sorted(value) == sorted(model.state_dict())
    assert value["out.weight"].data_ptr() == value["inside.weight"].data_ptr()
    assert other.note.text == model.note.text
    assert torch.equal(other.inside.weight, model.inside.weight)
    run.close()


class Note(torch.nn.Module):
    """Something beside tensors, too long for a record."""

    text = "known " * 9000

    def get_extra_state(self) -> dict[str, Any]:
        return {"text": self.text, "raw": self.text.encode()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["raw"].decode() == state["text"]
        self.text = state["text"]


class Tied(torch.nn.Module):
    """An output layer with the weights of the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Embedding(8, 4)
        self.out = torch.nn.Linear(4, 8, bias=False)
        self.out.weight = self.inside.weight
        self.note = Note()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inside(x))


# -- bytes -----------------------------------------------------------------------------------------


class Wide(torch.nn.Module):
    """A large layer that is frozen, and a small one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(512, 512)
        self.small = torch.nn.Linear(512, 4)
        self.large.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(x))


def train_wide(folder: Path, engine: str) -> list[int]:
    """What is kept in packs after each checkpoint."""
    model = models.seeded(Wide)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = sapwood.Run(model, torch.optim.AdamW(trained), folder=folder / "runs")
    kept = []
    with sapwood.Checkpointer(
        run, folder / "ckpts", tiers=("memory", store(folder)), keep=None, engine=engine
    ) as c:
        for step in range(3):
            run.model(torch.full((2, 512), float(step))).sum().backward()
            run.step()
            c.save()
            c.wait()
            run.group.gather_text("saved", "all")
            packs = (folder / "models" / "packs").rglob("*")
            kept.append(sum(path.stat().st_size for path in packs if path.is_file()))
            run.group.gather_text("looked", "all")
    run.close()
    return kept


@pytest.mark.parametrize(("world", "engine"), [(1, "node"), (2, "node"), (2, "sync")])
def test_frozen_layers_cost_nothing(tmp_path: Path, world: int, engine: str) -> None:
    kept = ranks.spawn(train_wide, world, tmp_path, engine)[0]
    changing = 3 * 4 * (512 * 4 + 4)
    assert kept[0] > 2**20
    more = [after - before for before, after in pairwise(kept)]
    # Beside it the ranks' records, of which the random state is the most.
    assert all(changing <= each < changing + 25_000 * world for each in more), kept


# -- one graph -------------------------------------------------------------------------------------


def lineage(folder: Path, name: str) -> list[str]:
    with sapwood.store.open(folder / "models", create=False) as repo:
        return [str(record.reference) for record in repo.log(name)]


def test_the_log_tells_where_a_model_was_restored(tmp_path: Path) -> None:
    first = Training(tmp_path)
    with checkpointer(first, tmp_path, every=2, engine="sync") as c:
        first.steps(4)
        c.restore(2)
        first.steps(6)
        again = c.stats.saves[-1].id.attempt
    first.close()
    then = Training(tmp_path)
    with checkpointer(then, tmp_path, every=2, engine="sync") as c:
        c.restore(4)
        then.steps(6)
    then.close()
    one, two = first.run.id, then.run.id
    assert lineage(tmp_path, f"{one}@step-4") == [f"{one}@step-4", f"{one}@step-2"]
    assert lineage(tmp_path, f"{two}@step-6") == [
        f"{two}@step-6",
        f"{one}@step-4-{again}",
        f"{one}@step-2",
    ]


def donate(folder: Path) -> None:
    """Train and save until told to stop, letting others fork."""
    training = Training(folder, timeout=30)
    with checkpointer(training, folder, every=1) as c:
        training.steps(2)
        c.wait()
        training.run.allow_clones()
        ranks.mark("open")
        while not (folder / "stop").exists():
            training.step()
    training.close()


def fork(folder: Path) -> tuple[str, str, int]:
    """Begin as a fork, and save a step of its own."""
    training = Training(folder, timeout=30)
    run = training.run
    run.wait_ready()
    parent = run.forked_from
    assert parent is not None
    with checkpointer(training, folder) as c:
        assert c.restore_latest() is None  # its parent's are not its own
        training.step()
        c.save()
        c.wait()
    training.close()
    return run.id, parent.run, parent.step


def test_a_fork_comes_from_its_parents_version(tmp_path: Path) -> None:
    with ranks.start(donate, 1, tmp_path) as group:
        group.wait_mark("open", rank=0, timeout=60)
        run, parent, step = ranks.spawn(fork, 1, tmp_path, env=order(home_of(tmp_path)))[0]
        (tmp_path / "stop").touch()
        assert ranks.failure(group.wait(timeout=60)) is None
    log = lineage(tmp_path, run)
    assert log[0] == f"{run}@step-{step + 1}"
    found = parse(log[1])
    assert found.name == parent
    assert 2 <= int(found.version.removeprefix("step-")) <= step
    assert log[-1] == f"{parent}@step-1"


def test_names_of_ones_own(tmp_path: Path) -> None:
    mine = TierSpec(kind="store", place=str(tmp_path / "models"), name="nt3/run7")
    training = Training(tmp_path)
    with checkpointer(training, tmp_path, tiers=(mine,), every=2, engine="sync") as c:
        training.steps(2)
        expected = training.state()
    training.close()
    assert [str(record.reference) for record in records(tmp_path)] == ["nt3/run7@step-2"]
    other = Training(tmp_path)
    short = f"{store(tmp_path)}?name=nt3/run7"
    with sapwood.Checkpointer(other.run, tmp_path / "elsewhere", tiers=(short,)) as c:
        assert c.restore_latest() is not None  # by its name, whatever the place is
        assert same(other.state(), expected)
    with sapwood.Checkpointer(
        other.run, tmp_path / "elsewhere", tiers=(store(tmp_path),), engine="sync"
    ) as c:
        assert c.restore_latest() is None  # another training in the same repository
    other.close()


# -- removing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sync", "node"])
def test_retention_leaves_what_has_a_tag(tmp_path: Path, engine: str) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path, keep=2, engine=engine) as c:
        for step in range(1, 6):
            training.step()
            c.save(metrics={"loss": 1.0 / step, "odd": float("nan")})
            c.wait()
            if step == 2:
                with sapwood.store.open(tmp_path / "models") as repo:
                    repo.tag(f"{training.run.id}@step-2", "best")
    found = records(tmp_path)
    assert [record.version for record in found] == ["step-2", "step-4", "step-5"]
    assert [dict(record.metrics) for record in found[1:]] == [{"loss": 0.25}, {"loss": 0.2}]
    with sapwood.store.open(tmp_path / "models") as repo:
        log = repo.log(training.run.id)
        assert [(r.version, r.removed is None) for r in log] == [
            ("step-5", True),
            ("step-4", True),
            ("step-3", False),
            ("step-2", True),
            ("step-1", False),
        ]
        repo.flush()
        assert not repo.verify().problems
    training.close()


def test_a_removed_version_is_not_restored(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path, tiers=(store(tmp_path),), every=2) as c:
        training.steps(2)
        early = training.state()
        training.steps(4)
        c.wait()
        with sapwood.store.open(tmp_path / "models") as repo:
            repo.remove(f"{training.run.id}@step-4")
            with pytest.raises(ModelNotFound):
                repo.load(f"{training.run.id}@step-4")
        assert c.restore_latest().step == 2
        assert same(training.state(), early)
    training.close()


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("store://", "no repository is named"),
        ("store://s3://bucket/models", "cannot hold checkpoints yet"),
        ("store://sapwood://host:7070", "cannot hold checkpoints yet"),
        ("store://memory:", "cannot hold checkpoints yet"),
        ("store://models?name=../x", "is no name of a model"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, tier: str, said: str) -> None:
    training = Training(tmp_path)
    with pytest.raises((ConfigError, sapwood.SapwoodError), match=said):
        sapwood.Checkpointer(training.run, tmp_path / "ckpts", tiers=(tier,))
    training.close()


def test_layouts_of_other_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="incremental and compress are for the local tier"):
        TierSpec(kind="store", place="models", incremental=True)
    with pytest.raises(ConfigError, match="are for store"):
        TierSpec(kind="external", place="ckpts", name="x")
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="name the repository among the tiers"):
        sapwood.Checkpointer(training.run, "store://models")
    training.close()


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "thesis.tex").write_text("years")
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="holds something else"):
        checkpointer(training, tmp_path)
    training.close()


# -- the command line ------------------------------------------------------------------------------


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path, every=2, engine="sync") as c:
        training.steps(4)
        assert c.stats.saves
    training.close()
    place, models_at, run = store(tmp_path), str(tmp_path / "models"), training.run.id

    def told(*arguments: str, code: int = 0) -> str:
        assert main(list(arguments)) == code
        return capsys.readouterr().out

    assert "whole" in told("ckpt", "ls", place)
    assert "2 checkpoints" in told("ckpt", "verify", "--place", place)
    assert "1 checkpoints" in told("ckpt", "verify", f"{place}/latest")
    assert f"{run}@step-4" in told("store", "ls", "--at", models_at)
    assert "head.weight" in told("store", "show", f"{run}@step-2", "--at", models_at)
    assert "momentum" not in told("store", "show", f"{run}@step-2", "--at", models_at)
    shown = told("store", "diff", f"{run}@step-2", f"{run}@step-4", "--at", models_at, code=1)
    assert "frozen" not in shown
    assert "head.weight" in shown
    assert f"{run}@step-2" in told("store", "log", f"{run}@step-4", "--at", models_at)
    out = tmp_path / "model.safetensors"
    told("store", "get", f"{run}@step-4", str(out), "--at", models_at)
    from safetensors.torch import load_file

    loaded = load_file(out)
    assert all(torch.equal(loaded[n], t) for n, t in training.model.state_dict().items())


def test_several_trainings_in_one_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, said = store(tmp_path), {}
    for name in ("", "nt3/x"):
        training = Training(tmp_path)
        tier = f"{place}?name={name}" if name else place
        with sapwood.Checkpointer(
            training.run, tmp_path / "ckpts", tiers=(tier,), every=2, engine="sync"
        ) as c:
            training.steps(4)
            c.wait()
            said[name] = str(c.stats.saves[-1].id)
        training.close()

    def asked(*arguments: str, code: int = 0) -> Any:
        assert main(["ckpt", *arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    listed = asked("ls", place)
    assert [one["branch"] for one in listed] == ["current"] * 4
    for name, query in (("", f"?place={tmp_path / 'ckpts'}"), ("nt3/x", "?name=nt3/x")):
        assert len(asked("ls", place + query)) == 2
        assert asked("verify", "latest", "--place", place + query)["checked"] == [said[name]]
    assert main(["ckpt", "verify", f"{place}/latest"]) == 1
    ways = f"{place}?place={tmp_path / 'ckpts'} or {place}?name=nt3/x"
    assert ways in capsys.readouterr().err.replace("\n", "")
    assert main(["ckpt", "verify", "4", "--place", place]) == 1
    assert "may be of 2 trainings" in capsys.readouterr().err
    assert asked("verify", said["nt3/x"], "--place", place)["damages"] == []
    assert main(["ckpt", "ls", f"{place}?nmae=x"]) == 1
    assert "expected ?name=" in capsys.readouterr().err
