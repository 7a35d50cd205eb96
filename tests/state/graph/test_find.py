"""How graphs are found: the ladder, odd forwards, and a model that is left as it was."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sapwood.errors import ConfigError, GraphError
from sapwood.state.graph import Kind, Sample, Source, find_graph
from tests.state.graph import models

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")


class Busy(nn.Module):
    """A forward with every side effect that one can have on its model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.calls, self.history, self.last = 0, [], None
        self.seen: dict[str, Any] = {"shapes": collections.deque(maxlen=3)}
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.zeros(4)
        self.generator = torch.Generator().manual_seed(1)
        self.rng = random.Random(1)
        self.weight_view = self.b.weight.view(-1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x)
        self.seen["shapes"].append(tuple(x.shape))
        self.steps += 1
        self.plain.add_(1)
        self.rng.random()
        random.random()
        np.random.rand()
        torch.rand(1)
        if x.device.type != "meta":
            torch.rand(1, generator=self.generator)
        self.bn.momentum = 0.9
        y = self.drop(self.bn(self.a(x)))
        self.last = y
        self.new_attribute = y
        x += 1
        return nn.functional.linear(y, self.weight_view.view(4, 4)) + self.plain


def state_of(model: nn.Module) -> dict[str, Any]:
    """All of a module tree that a forward could have changed, by value and by identity."""
    out: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            kept = value.clone() if isinstance(value, Tensor) else value
            if isinstance(value, torch.Generator):
                kept = value.get_state()
            elif isinstance(value, random.Random):
                kept = value.getstate()
            elif isinstance(value, list | dict | collections.deque):
                kept = copy.copy(value)
            out[f"{name}.{key}"] = (id(value), kept)
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                out[f"{name}.{key}!"] = (id(value), value.detach().clone(), value._version)
    return out


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) if not isinstance(a, dict) else a.keys() == b.keys()


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_all_random_numbers_stay_as_they_are(meta: bool, training: bool) -> None:
    from sapwood.state.graph.ids import Hasher
    from sapwood.state.graph.sample import as_sample
    from sapwood.state.graph.traced import trace_graph

    model, x = Busy().train(training), torch.randn(2, 4)
    fired = []
    model.register_forward_hook(lambda *_: fired.append("f"))
    model.a.register_forward_pre_hook(lambda *_: fired.append("p"))
    sum(p.sum() for p in model.parameters()).backward()
    model(x.clone())
    model.a.register_full_backward_hook(lambda *_: fired.append("b"))
    fired.clear()
    before, given = state_of(model), x.clone()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    chances = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    found = trace_graph(model, as_sample(x), Hasher(), meta=meta)
    assert [v.name for v in found.layers] == ["a", "bn", "drop", "b", ""]
    assert found.vertices[-2].kind is Kind.OWNER
    assert found.vertices[-1].kind is Kind.UNUSED
    after = state_of(model)
    assert before.keys() == after.keys()
    assert [k for k in before if not same(before[k], after[k])] == []
    assert same(
        chances, (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    )
    assert all(
        torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters() if n in gradients
    )
    assert torch.equal(x, given)
    assert not fired
    assert not hasattr(x, "_sapwood_mark")
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    model(x.clone())
    assert fired


def test_a_forward_that_raises_leaves_the_model_as_it_was() -> None:
    class Failing(Busy):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("no such thing")

    model = Failing()
    before = state_of(model)
    found = find_graph(model, torch.randn(2, 4))
    assert [k for k, v in state_of(model).items() if not same(before[k], v)] == []
    assert found.approximate
    assert found.reason.count("KeyError") >= 2


class OnCpuOnly(nn.Module):
    """Its forward goes through numpy, which the meta device has no values for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.from_numpy(np.ones(4, np.float32)) + torch.tensor([1.0] * 4, device="cpu")
        y = self.a(x) * scale
        if x.device.type == "meta":
            raise NotImplementedError("no kernel")
        return self.b(y)


def test_a_forward_that_fails_on_meta_runs_on_copies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sapwood"):
        found = find_graph(OnCpuOnly(), torch.randn(1, 4))
    assert found.source is Source.TRACED
    assert not found.reads_values
    assert "NotImplementedError: no kernel" in found.reason
    assert "NotImplementedError: no kernel" in caplog.text
    assert (
        found.ids
        == find_graph(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)).ids
    )


def test_constants_on_another_device_do_not_stop_a_trace_on_meta() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(4, 4), torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.scale + torch.ones(4, device="cpu")

    assert find_graph(Constants(), torch.ones(1, 4)).reason == ""


@pytest.mark.parametrize(
    "look",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: x.sum().item() > 0,
        lambda x: x.tolist(),
        lambda x: x.detach().numpy(),
        lambda x: np.asarray(x),
        lambda x: x[x > 0].shape,
        lambda x: torch.nonzero(x).shape,
        lambda x: torch.where(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x).shape,
        lambda x: torch.allclose(x, x),
        lambda x: int(x[0, 0]),
        lambda x: x.masked_select(x > 0).numel(),
        lambda x: [row for row in x if row[0] > 0],
        lambda x: f"{x.sum()}",
        lambda x: list(range(10))[x.argmax()],
    ],
)
def test_looking_at_values_is_noticed(look: Any) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            look(y)
            return self.b(y)

    found = find_graph(Looks(), torch.randn(2, 4))
    if found.reason:  # it did not work without values
        assert found.reads_values, found.reason
        assert [v.named for v in found.layers] == [False, True]


def test_which_way_was_taken_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = models.CellLoop()
    with caplog.at_level(logging.INFO, logger="sapwood"):
        found = find_graph(model)
    assert found.source is Source.TREE
    assert found.approximate
    assert "traced: no sample was given; symbolic: " in found.reason
    assert any(r.levelno == logging.WARNING and "module tree" in r.message for r in caplog.records)
    with pytest.raises(GraphError, match="no graph of CellLoop can be found: traced: no sample"):
        find_graph(model, allow=[Source.TRACED, Source.SYMBOLIC])


def test_a_program_of_another_model_is_refused() -> None:
    program = torch.export.export(nn.Linear(4, 5), (torch.ones(1, 4),))
    with pytest.raises(ConfigError, match="another model"):
        find_graph(nn.Linear(4, 6), exported=program)
    with pytest.raises(ConfigError, match="expected what torch"):
        find_graph(nn.Linear(4, 6), exported=nn.Linear(4, 5))


@dataclasses.dataclass
class Batch:
    image: Tensor
    extra: dict[str, list[Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: Any, *, other: Any) -> Any:
        if isinstance(batch, Batch):
            batch = {"image": batch.image, "extra": batch.extra}
        return {"out": (self.a(batch["image"]), [self.b(batch["extra"]["x"][0] + other[0])])}


def test_samples_may_be_nested_in_any_way() -> None:
    one, two, three = (torch.randn(1, 4) for _ in range(3))
    want = find_graph(Nested(), Sample({"image": one, "extra": {"x": [two]}}, other=(three,)))
    assert want.source is Source.TRACED
    assert len(want.ids) == 2
    batch = Batch(one, {"x": [two]})
    assert find_graph(Nested(), {"batch": batch, "other": [three]}) == want
    ordered = collections.OrderedDict(extra={"x": (two,)}, image=one)
    assert find_graph(Nested(), Sample(ordered, other=[three])) == want


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"sample does not fit Linear.forward: .*Sample\("):
        find_graph(nn.Linear(4, 4), {"x": torch.ones(1, 4)})


def test_the_models_own_sample_is_taken() -> None:
    model = models.Encoder()
    model.example_input_array = models.Encoder.sample()
    assert find_graph(model) == find_graph(model, models.Encoder.sample())


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(GraphError, match="module 1 has lazy parameters"):
        find_graph(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), torch.ones(1, 2))


def test_parametrized_layers_are_one_layer() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    normed = copy.deepcopy(plain)
    parametrizations.weight_norm(normed[0])
    parametrizations.spectral_norm(normed[2])
    x = torch.ones(1, 4)
    one, two = find_graph(plain, x), find_graph(normed, x)
    assert [v.kind for v in two.layers] == [v.kind for v in one.layers]
    assert two.source is Source.TRACED
    assert two.reason == ""
    assert "0.parametrizations.weight.original0" in two.tensors
    assert set(two.tensors) == set(normed.state_dict())
    assert not set(one.ids) & set(two.ids)


@pytest.mark.filterwarnings("ignore")
def test_old_weight_norm_and_pruning_work_by_hooks() -> None:
    from torch.nn.utils import prune, weight_norm

    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    prune.l1_unstructured(model[1], "weight", 2)
    found = find_graph(model, torch.ones(1, 4))
    assert [v.kind for v in found.layers] == [Kind.OWNER] * 2
    assert found.reason == ""
    assert set(found.tensors) == set(model.state_dict())


class Forces(nn.Module):
    """Differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_forward_may_differentiate() -> None:
    found = find_graph(Forces(), torch.randn(2, 3))
    assert found.source is Source.TRACED
    assert found.reason == ""
    assert [v.name for v in found.layers if v.tensors] == ["a", "b"]


class Shares(nn.Module):
    """A leaf that uses another module's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.scale = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Identity()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.scale(self.body(x)) @ self.embed.weight.T


def test_raw_parameters_belong_to_their_modules() -> None:
    found = find_graph(Shares(), torch.zeros(2, 3, dtype=torch.long))
    assert [(v.kind, v.name) for v in found.vertices if v.kind is not Kind.JOIN] == [
        (Kind.OWNER, "embed"),
        (Kind.OWNER, ""),
        (Kind.OWNER, "body"),
        (Kind.PLAIN, "scale"),
        (Kind.AGAIN, ""),
    ]


def test_writes_through_views_are_followed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 4)
            left, right = out[:, :2], out[:, 2:]
            left.copy_(self.a(x))
            right[:] = self.b(x)
            return self.c(out)

    found = find_graph(Writes(), torch.ones(1, 2))
    last = found.vertices[-1]
    assert last.name == "c"
    assert [found.vertices[n].name for n in found.vertices[last.inputs[0]].inputs] == ["a", "b"]


def test_a_closure_over_the_real_tensors_is_seen_through() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = model[1].weight
    model[1].forward = lambda x: nn.functional.linear(x, weight)
    found = find_graph(model, torch.ones(1, 3))
    assert [v.kind for v in found.layers] == [Kind.OWNER] * 2
    assert found.reason == ""


def test_a_layer_that_is_no_child_stays_as_it_was() -> None:
    from sapwood.state.graph.ids import Hasher
    from sapwood.state.graph.sample import as_sample
    from sapwood.state.graph.traced import trace_graph

    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.hidden = nn.Linear(4, 4), [nn.BatchNorm1d(4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](self.a(x))

    for meta in (True, False):
        model = Hides()
        before = copy.deepcopy(model.hidden[0].state_dict())
        found = trace_graph(model, as_sample(torch.randn(3, 4)), Hasher(), meta=meta)
        assert [v.name for v in found.layers] == ["a"]
        after = model.hidden[0].state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_leaf_that_hands_out_values_is_noticed() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> Any:
            return (x @ self.weight).argmax(-1).tolist()

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = Router(), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[self.router(x)[0]](x)

    found = find_graph(Chooses(), torch.randn(1, 4))
    assert found.reads_values
    assert all(v.named for v in found.layers if v.name.startswith("experts"))
