"""What state dicts of models and optimizers hold comes back, or is refused; nothing is left out."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.cli.verbs.ckpt.export import export
from sapwood.errors import CheckpointError, SapwoodError
from sapwood.testing import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Counting(Net):
    """Counts its forward passes, and weighs with the count."""

    count = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "last": torch.full((2,), float(self.count))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class BothWays(Net):
    """A buffer under a name that is kept, and under another that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("also_seen", self.seen, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(x)


class Odd(Net):
    """Views with a lazy conjugation or sign, and one element with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("negated", torch.randn(1, dtype=torch.complex64).conj().imag)
        self.register_buffer("one", torch.randn(4)[::2][:1])
        self.register_buffer("wide", torch.randn(1, 3).expand(2, 3))
        for dtype in (torch.bool, torch.int16, torch.uint16, torch.uint64, torch.float8_e5m2):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.rand(3).to(dtype))


class Keyed(torch.optim.Optimizer):
    """An average per key in a parameter's state, and what belongs to no parameter."""

    def __init__(self, parameters: Any, keys: tuple[Any, ...]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.keys = keys

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        known = self.state.get("all", {"steps": 0})
        self.state["all"] = {"steps": known["steps"] + 1}
        for parameter in self.param_groups[0]["params"]:
            for key in self.keys:
                mean = self.state[parameter].setdefault(key, torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                parameter.sub_(mean, alpha=0.1 / self.state["all"]["steps"])


class Inside(torch.optim.Optimizer):
    """Wraps another optimizer, whose state is all that its state dict has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.AdamW(self.param_groups)

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


Make = Callable[[Any], torch.optim.Optimizer]


class Training:
    def __init__(
        self,
        folder: Path,
        net: type[Net],
        make: Make | None = None,
        *,
        whole: bool = False,
        engine: str = "layerwise",
    ) -> None:
        self.net = net()
        parameters = self.net.parameters()
        self.optimizer = make(parameters) if make else torch.optim.AdamW(parameters, lr=0.1)
        self.run = sapwood.Run(self.net, self.optimizer, folder=folder / "runs", engine=engine)
        shared = {"optimizer": self.optimizer} if whole else {}
        self.ckpt = sapwood.Checkpointer(
            self.run, folder / "ckpts", engine="sync", shared=shared, max_failures=1
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run.model(torch.ones(2, 4)).pow(2).mean().backward()
            self.run.step()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy([self.net.state_dict(), self.optimizer.state_dict()])

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()
        self.run.close()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        both = left.dtype == right.dtype and left.shape == right.shape
        return both and torch.equal(left.to(torch.complex128), right.to(torch.complex128))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def comes_back(folder: Path, net: type[Net], make: Make | None = None, **options: Any) -> None:
    with Training(folder, net, make, **options) as one:
        one.steps(2)
        one.ckpt.save()
        saved = one.state()
        one.steps(2)
        last = one.state()
    with Training(folder, net, make, **options) as other:
        other.ckpt.restore(2)
        assert same(other.state(), saved)
        other.steps(2)
        assert same(other.state(), last)


@pytest.mark.parametrize("net", [Counting, BothWays, Odd], ids=lambda n: n.__name__)
def test_all_that_a_models_state_dict_has_comes_back(tmp_path: Path, net: type[Net]) -> None:
    comes_back(tmp_path, net)


@pytest.mark.parametrize("keys", [("a/b", "c"), (0, 1), (0, "a", ("b", 1))], ids=str)
def test_all_that_an_optimizers_state_has_comes_back(tmp_path: Path, keys: Any) -> None:
    comes_back(tmp_path, Net, lambda parameters: Keyed(parameters, keys))


def test_an_optimizer_whose_state_dict_has_more_is_refused_or_saved_whole(tmp_path: Path) -> None:
    with Training(tmp_path / "refused", Net, Inside) as one:
        one.steps(1)
        with pytest.raises(CheckpointError, match=r'Inside.*shared=\{"optimizer": optimizer\}'):
            one.ckpt.save()
    comes_back(tmp_path, Net, Inside, whole=True)


def load(optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(state))


def clear(optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.state.clear()


def replace(optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("change", [load, clear, replace], ids=lambda c: c.__name__)
def test_a_state_that_was_replaced_is_saved_and_not_the_old_one(
    tmp_path: Path, change: Callable[[torch.optim.Optimizer, Any], None]
) -> None:
    with Training(tmp_path, Net) as one:
        one.steps(2)
        one.ckpt.save()
        change(one.optimizer, one.optimizer.state_dict())
        one.steps(1)
        one.ckpt.save()
        kept = one.state()
        one.steps(1)
        one.ckpt.restore(3)
        assert same(one.state(), kept)


def odd_on_ranks(folder: Path, engine: str) -> Any:
    torch.manual_seed(ranks.rank())
    with Training(folder, Odd, engine=engine) as one:
        one.steps(2)
        kept = one.state()
        one.ckpt.save()
        one.steps(1)
        one.ckpt.restore(2)
        assert same(one.state(), kept)
        return [[n, t.to(torch.complex128).tolist()] for n, t in one.net.state_dict().items()]


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
def test_odd_buffers_on_two_ranks_are_rank_0s(tmp_path: Path, engine: str) -> None:
    first, second = ranks.spawn(odd_on_ranks, 2, tmp_path, engine)
    assert first == second


def test_what_cannot_be_saved_of_an_optimizer_is_named(tmp_path: Path) -> None:
    with Training(tmp_path, Net) as one:
        one.steps(1)
        one.optimizer.state[one.net.layer.bias]["sparse"] = torch.eye(2).to_sparse()
        with pytest.raises(SapwoodError, match=r"layer.bias/sparse is float32.*convert it$"):
            one.ckpt.save()


class Reserved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("__metadata__", torch.zeros(1))


def test_a_name_that_safetensors_reserves_is_refused(tmp_path: Path) -> None:
    with Training(tmp_path, Reserved) as one:
        one.steps(1)
        with pytest.raises(SapwoodError, match="model __metadata__ cannot be saved"):
            one.ckpt.save()


@pytest.mark.parametrize("net", [Counting, BothWays], ids=lambda n: n.__name__)
def test_an_export_loads_strictly(tmp_path: Path, net: type[Net]) -> None:
    with Training(tmp_path, net) as one:
        one.steps(2)
        one.ckpt.save()
        saved = one.state()[0]
    file = tmp_path / "model.pt"
    export(f"{tmp_path}/ckpts/latest", file)
    fresh = net()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert same(dict(fresh.state_dict()), dict(saved))
