"""The further ways to find a graph: an exported program, torch.fx, the module tree."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from sapwood.errors import ConfigError, GraphError
from sapwood.state.graph.borrow import borrow, quiet_random
from sapwood.state.graph.builder import GraphBuilder, Origin
from sapwood.state.graph.configure import (
    describe_module,
    find_owners,
    function_layer,
    functional,
    is_leaf,
    parts_of_leaves,
)
from sapwood.state.graph.ids import Hasher
from sapwood.state.graph.model import Graph, Source
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["exported_graph", "symbolic_graph", "tree_graph"]


@dataclass(slots=True)
class _Value:
    """What is known of a node's result."""

    origin: Origin | None = None
    weights: tuple[int, ...] = ()


class _Walk:
    """Gives every node of an ``fx.Graph`` its origin."""

    def __init__(self, model: nn.Module) -> None:
        self.root = unwrap(model)
        owners, index = find_owners(self.root)
        self.builder = GraphBuilder(owners)
        self.index = index
        self.modules = {clean_name(n): unwrap(m) for n, m in self.root.named_modules()}
        self.parts = parts_of_leaves(self.root)
        self.values: dict[fx.Node, _Value] = {}
        self.holders: dict[int, list[int]] = {}
        for n, owner in enumerate(owners):
            for slot in owner.slots:
                self.holders.setdefault(slot.tensor, []).append(n)

    def weight(self, tensor: Any) -> _Value:
        """The value of a node that is one of the model's tensors."""
        return _Value(weights=(id(tensor),) if id(tensor) in self.holders else ())

    def read(self, node: fx.Node) -> list[_Value]:
        """What a node reads, in order."""
        return [self.values[one] for one in node.all_input_nodes]

    def call(self, module: nn.Module, name: str, read: Sequence[_Value]) -> _Value:
        """A call of a leaf module."""
        inputs = self.inputs(read, self.index.get(id(module)))
        owner = self.index.get(id(module))
        if owner is None:
            vertex = self.builder.plain(describe_module(module), inputs, name)
        else:
            vertex = self.builder.owner(owner, inputs)
        return _Value(Origin((vertex,)))

    def inputs(self, read: Sequence[_Value], owner: int | None) -> list[Origin]:
        """What a layer reads; tensors of other modules come from their layer."""
        found = [v.origin for v in read if v.origin is not None]
        for weight in dict.fromkeys(w for v in read for w in v.weights):
            other = self.owner_of(weight, owner)
            if other != owner:
                used = self.builder.used(other)
                vertex = self.builder.owner(other, []) if used is None else used
                found.append(Origin((vertex,)))
        return list(dict.fromkeys(found))

    def owner_of(self, weight: int, owner: int | None) -> int:
        """Which of the modules that hold a tensor uses it."""
        holders = self.holders[weight]
        if owner in holders:
            return holders[holders.index(owner)]
        return next((h for h in holders if self.builder.used(h) is not None), holders[0])

    def combine(self, read: Sequence[_Value], function: str = "") -> _Value:
        """An operation outside of leaf modules."""
        origin = self.builder.union(v.origin for v in read if v.origin is not None)
        weights = tuple(dict.fromkeys(w for v in read for w in v.weights))
        if origin is None:
            return _Value(weights=weights)
        if weights:
            owners = dict.fromkeys(self.owner_of(weight, None) for weight in weights)
            uses = [Origin((self.builder.owner(owner, [origin]),)) for owner in owners]
            return _Value(self.builder.union(uses))
        layer = function_layer(function)
        if layer is not None:
            return _Value(Origin((self.builder.plain(functional(layer), [origin]),)))
        return _Value(origin)


def symbolic_graph(model: nn.Module, hasher: Hasher) -> Graph:
    """The graph by ``torch.fx``, which needs no sample and follows no branches.

    Raises:
        Exception: whatever makes the model untraceable.
    """
    walk = _Walk(model)
    tracer = _LeafTracer(walk.parts)
    with quiet_random(), borrow(walk.root, meta=True, wrap=lambda _m, _f: None) as borrowed:
        defaults = _defaults(walk.root)
        graph = tracer.trace(walk.root, concrete_args=defaults or None)
        originals = {id(made): key for key, made in borrowed.stand_ins.items()}
        modules = dict(walk.root.named_modules())
        for node in graph.nodes:
            walk.values[node] = _symbolic_value(walk, node, modules, originals)
    return walk.builder.finish(Source.SYMBOLIC, "", hasher)


def _symbolic_value(
    walk: _Walk, node: fx.Node, modules: dict[str, nn.Module], originals: dict[int, int]
) -> _Value:
    if node.op == "placeholder":
        order = list(inspect.signature(walk.root.forward).parameters)
        name = str(node.target).lstrip("*")
        return _Value(Origin(place=str(order.index(name)) if name in order else name))
    if node.op == "get_attr":
        held: Any = walk.root
        for part in str(node.target).split("."):
            held = getattr(held, part)
        key = originals.get(id(held), 0)
        return _Value(weights=(key,) if key in walk.holders else ())
    read = walk.read(node)
    if node.op == "call_module":
        return walk.call(modules[str(node.target)], clean_name(str(node.target)), read)
    if node.op == "output":
        return _Value()
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return walk.combine(read, str(name))


class _LeafTracer(fx.Tracer):
    """Takes leaf modules as one node, and goes into all others."""

    def __init__(self, parts: set[int]) -> None:
        super().__init__()
        self._parts = parts

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether ``m`` is one layer."""
        return is_leaf(m) and id(m) not in self._parts


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Optional arguments of the forward keep their defaults: else they would count as passed."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def exported_graph(model: nn.Module, program: Any, hasher: Hasher) -> Graph:
    """The graph of an exported program, folded back to modules.

    Raises:
        ConfigError: the program was exported from another model.
    """
    walk = _Walk(model)
    if not isinstance(program, torch.export.ExportedProgram):
        raise ConfigError(
            f"exported is a {type(program).__name__}, expected what torch.export.export returns"
        )
    tensors = _matched(walk.root, program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            walk.values[node] = _placeholder(walk, node, program, tensors)
    calls: dict[str, _Call] = {}
    of: dict[fx.Node, _Call] = {}
    for node in program.graph.nodes:
        where = _leaf_of(walk, node) if node.op in ("call_function", "get_attr") else None
        if where is not None:
            key, module, path = where
            of[node] = calls.setdefault(key, _Call(module, path))
            of[node].nodes[node] = None
    for node in program.graph.nodes:
        if node in of:
            walk.values[node] = of[node].result(walk)
        elif node.op in ("call_function", "get_attr"):
            name = str(getattr(getattr(node.target, "_schema", None), "name", "")).split("::")[-1]
            walk.values[node] = walk.combine(walk.read(node), name)
    return walk.builder.finish(Source.EXPORTED, "", hasher)


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a leaf module in a program."""

    module: nn.Module
    path: str
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    value: _Value | None = None

    def result(self, walk: _Walk) -> _Value:
        """What its nodes give; the layer is made at the first one."""
        if self.value is None:
            read = dict.fromkeys(one for node in self.nodes for one in node.all_input_nodes)
            outside = [one for one in read if one not in self.nodes]
            if any(one not in walk.values for one in outside):
                raise GraphError(f"the call of {self.path} reads what other layers make in it")
            self.value = walk.call(self.module, self.path, [walk.values[one] for one in outside])
        return self.value


def _leaf_of(walk: _Walk, node: fx.Node) -> tuple[str, nn.Module, str] | None:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    for key, (path, _) in stack.items():
        name = clean_name(str(path).partition("@")[0].removeprefix("L['self']").lstrip("."))
        module = walk.modules.get(name)
        if module is not None and is_leaf(module) and id(module) not in walk.parts:
            return str(key), module, name
    return None


def _matched(root: nn.Module, program: Any) -> dict[str, Any]:
    """The model's tensors by the program's names of them."""
    ours = {
        clean_name(name): tensor
        for name, tensor in (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        )
    }
    theirs = program.state_dict
    wrong = [
        f"{name} {tuple(tensor.shape)}"
        for name, tensor in theirs.items()
        if clean_name(name) not in ours or ours[clean_name(name)].shape != tensor.shape
    ]
    known = {clean_name(name) for name in theirs}
    absent = sorted({clean_name(n) for n in root.state_dict()} - known)
    if wrong or absent:
        raise ConfigError(
            "exported is a program of another model: "
            f"it has {', '.join(wrong[:5]) or 'nothing else'}, it lacks "
            f"{', '.join(absent[:5]) or 'nothing'}; export this model again"
        )
    return ours


def _placeholder(walk: _Walk, node: fx.Node, program: Any, tensors: dict[str, Any]) -> _Value:
    signature = program.graph_signature
    for names in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        if node.name in names:
            return walk.weight(tensors.get(clean_name(names[node.name])))
    value = node.meta.get("val")
    user = node.name in signature.user_inputs
    real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if not (user and real):
        return _Value()
    return _Value(Origin(place=str(signature.user_inputs.index(node.name))))


def tree_graph(model: nn.Module, hasher: Hasher) -> Graph:
    """A chain of the leaf modules in the order in which they were registered: approximate.

    Nothing here tells what feeds what, so ids cover names: q and k that were registered in another
    order must not be taken for each other.
    """
    root = unwrap(model)
    owners, index = find_owners(root)
    builder = GraphBuilder(owners)
    builder.by_name = True
    parts = parts_of_leaves(root)
    last: list[Origin] = []
    for path, module in root.named_modules():
        if id(module) in parts or not (is_leaf(module) or id(module) in index):
            continue
        owner = index.get(id(module))
        if owner is not None:
            vertex = builder.owner(owner, last)
        else:
            vertex = builder.plain(describe_module(module), last, clean_name(path))
        last = [Origin((vertex,))]
    return builder.finish(Source.TREE, "", hasher)
