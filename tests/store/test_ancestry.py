"""Ancestors of new architectures: found by what layers are, not by what they are called."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sapwood.errors import ConfigError, StoreError
from sapwood.store import Repository
from sapwood.store import open as open_repository
from tests.repository.providers.clusters import Cluster

SAMPLE = torch.randn(2, 3, 8, 8)


@pytest.fixture(params=["folder", "shared", "cluster"])
def repo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    if request.param == "cluster":
        cluster = Cluster(2)
        with cluster.repository() as repository:
            yield repository
        cluster.close()
        return
    with open_repository(tmp_path / "models", shared=request.param == "shared") as repository:
        yield repository


class Net(nn.Module):
    """A few blocks, and a head of any width; ``prefix`` changes every name."""

    def __init__(self, blocks: int, classes: int = 10, prefix: str = "block") -> None:
        super().__init__()
        self.names = [f"{prefix}{n}" for n in range(blocks)]
        width = 3
        for name in self.names:
            self.add_module(name, nn.Sequential(nn.Conv2d(width, 16, 3, padding=1), nn.ReLU()))
            width = 16
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return self.head(x.mean((2, 3)))


def test_the_longest_prefix_wins_whatever_its_names(repo: Repository) -> None:
    repo.save(Net(1), "short@1", sample=SAMPLE)
    repo.save(Net(3, prefix="stage"), "long@1", sample=SAMPLE)
    repo.save(Net(5, classes=7, prefix="part"), "longer@1", sample=SAMPLE)
    found = repo.best_ancestor(Net(4), SAMPLE)
    assert found is not None
    assert str(found.record.reference) == "longer@1"
    assert found.layers == 8  # four convolutions with what follows them, and no head
    assert 0.9 < found.share < 1.0


def test_what_is_in_common_is_copied_and_nothing_else(repo: Repository) -> None:
    old, new = Net(3, prefix="stage"), Net(4, classes=5)
    repo.save(old, "old@1", sample=SAMPLE)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    done = repo.transfer(new, sample=SAMPLE)
    assert done is not None
    assert sorted(done.copied) == sorted(
        f"block{n}.0.{kind}" for n in range(3) for kind in ("weight", "bias")
    )
    for name, value in new.state_dict().items():
        if name in done.copied:
            assert torch.equal(value, old.state_dict()[name.replace("block", "stage")])
        else:
            assert torch.equal(value, before[name])


def test_of_equals_the_better_or_the_newer_one_is_taken(repo: Repository) -> None:
    for version, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        repo.save(Net(2), f"a@{version}", metrics={"acc": accuracy}, sample=SAMPLE)
    repo.save(Net(2), "b@1", sample=SAMPLE)

    def best(**options: object) -> str:
        found = repo.best_ancestor(Net(2), SAMPLE, **options)  # type: ignore[arg-type]
        assert found is not None
        return str(found.record.reference)

    assert best() == "b@1"
    assert best(by="acc") == "a@2"
    assert best(by="acc", lower=True) == "a@1"
    assert best(pattern="a") == "a@3"
    repo.remove("a@2")
    assert best(by="acc") == "a@3"


def test_siblings_never_swap(repo: Repository) -> None:
    class Attention(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                self.add_module(name, nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    old, new = Attention("qkv"), Attention("vkq")
    sample = torch.randn(2, 4, 8)
    repo.save(old, "old@1", sample=sample)
    done = repo.transfer(new, sample=sample)
    assert done is not None
    for name, value in old.state_dict().items():
        assert torch.equal(new.state_dict()[name], value)


def test_another_dtype_is_left_and_listed(repo: Repository) -> None:
    repo.save(Net(2), "old@1", sample=SAMPLE)
    new = Net(2).double()
    done = repo.transfer(new, sample=SAMPLE.double())
    assert done is not None
    assert done.copied == ()
    assert len(done.left) == 6


def test_nothing_in_common_is_none(repo: Repository) -> None:
    assert repo.best_ancestor(Net(1), SAMPLE) is None
    repo.save(nn.Sequential(nn.Linear(4, 4)), "other@1", sample=torch.randn(1, 4))
    assert repo.best_ancestor(Net(1), SAMPLE) is None
    assert repo.transfer(Net(1), sample=SAMPLE) is None


def test_a_version_can_be_named(repo: Repository) -> None:
    old = Net(2)
    repo.save(old, "a@1", sample=SAMPLE)
    repo.save(Net(2), "a@2", sample=SAMPLE)
    new = Net(2)
    done = repo.transfer(new, "a@1", SAMPLE)
    assert done is not None
    assert torch.equal(new.head.weight, old.head.weight)
    repo.save(old.state_dict(), "plain@1")
    with pytest.raises(StoreError, match="without its architecture"):
        repo.transfer(new, "plain@1", SAMPLE)


def test_a_sample_without_a_module_is_refused(repo: Repository) -> None:
    with pytest.raises(ConfigError, match="goes with a module"):
        repo.save(Net(1).state_dict(), "a@1", sample=SAMPLE)
    with pytest.raises(ConfigError):
        repo.save(Net(1), "a@1", sample={"wrong": SAMPLE})
    assert repo.models() == []


def test_a_second_save_of_an_architecture_hashes_nothing(repo: Repository) -> None:
    net = Net(3)
    repo.save(net, "a@1", sample=SAMPLE)
    computed = repo._ancestry.graphs.hasher.computed
    repo.save(net, "a@2", sample=SAMPLE)
    assert repo._ancestry.graphs.hasher.computed == computed
    repo.save(Net(4), "b@1", sample=SAMPLE)
    more = repo._ancestry.graphs.hasher.computed - computed
    assert 0 < more < 8  # the new block, the head, and what leads there


def test_ancestors_outlive_the_process(tmp_path: Path) -> None:
    old = Net(2)
    with open_repository(tmp_path / "m") as repo:
        repo.save(old, "a@1", sample=SAMPLE)
    with open_repository(tmp_path / "m") as repo:
        new = Net(3)
        done = repo.transfer(new, sample=SAMPLE)
        assert done is not None
        assert torch.equal(new.block1[0].weight, old.block1[0].weight)
