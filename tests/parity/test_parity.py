"""Same losses and weights as DistributedDataParallel and the optimizer, on 1, 2 and 4 ranks.

Bit for bit on 1 and 2 ranks, where a sum has one order. On 4 ranks bit for bit against a loop by
hand that adds in the same order, and within float rounding against DDP, whose buckets differ from
ours and for which gloo adds in an order that depends on where an element lies in its message.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sapwood.testing import ranks
from tests.parity import loops
from tests.parity.loops import Case

MOMENTUM = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4}
SMALL = {"first_bucket_mb": 0.02, "bucket_mb": 0.1}

CASES = {
    "mlp-sgd": Case(workload="mlp", options={"layers": 6, "layer_bytes": 40000}, hyper=MOMENTUM),
    "mlp-clip": Case(
        workload="mlp", options={"layers": 4, "layer_bytes": 40000}, hyper=MOMENTUM, clip=0.1
    ),
    "nt3-adam": Case(workload="nt3", options={"mb": 1.0}, optimizer="Adam", hyper={"lr": 1e-3}),
    "nt3-adam-fused": Case(
        workload="nt3", options={"mb": 1.0}, optimizer="Adam", hyper={"lr": 1e-3, "fused": True}
    ),
    "transformer-adamw": Case(workload="transformer", optimizer="AdamW", hyper={"lr": 1e-3}),
    "resnet50-sgd": Case(
        workload="resnet50",
        options={"width": 0.125, "image": 32, "classes": 10},
        hyper=MOMENTUM,
        steps=3,
    ),
    "resnet152-sgd": Case(
        workload="resnet152",
        options={"width": 0.0625, "image": 32, "classes": 10},
        hyper=MOMENTUM,
        steps=2,
    ),
    "densenet121-sgd": Case(
        workload="densenet121",
        options={"width": 0.25, "image": 32, "classes": 10},
        hyper=MOMENTUM,
        steps=2,
    ),
}
# After one step. Adam divides by the gradient's size, so rounding of a tiny gradient shows in full.
ROUNDING = {"SGD": 1e-6, "Adam": 1e-4, "AdamW": 1e-4}


def compare(case: Case) -> dict[str, float | bool]:
    expected = loops.train_ddp(case)
    ours = loops.train_ours(case, **SMALL)
    facts: dict[str, float | bool] = {
        "layerwise": loops.distance(expected, ours),
        "same losses": expected.losses == ours.losses,
        "replicas": loops.replicas_differ(ours),
        "buckets": len(ours.buckets),
    }
    if loops.world() > 1:
        through_ddp = loops.train_ours(case, engine="ddp")
        facts["ddp"] = loops.distance(expected, through_ddp)
    return facts


def compare_on_many(case: Case) -> dict[str, float]:
    ours = loops.train_ours(case, **SMALL)
    facts = {"replicas": loops.replicas_differ(ours)}
    if case.clip is None:
        facts["by hand"] = loops.distance(loops.train_by_hand(case, ours.buckets, "node"), ours)
    if case.workload == "mlp" and case.clip is None:
        direct = loops.train_ours(case, averaging="direct", **SMALL)
        by_gloo = loops.train_by_hand(case, direct.buckets, "direct")
        facts["direct"] = loops.distance(by_gloo, direct)
    one_step = replace(case, steps=1)
    expected = loops.train_ddp(one_step)
    facts["layerwise"] = loops.distance(expected, loops.train_ours(one_step, **SMALL))
    facts["ddp"] = loops.distance(expected, loops.train_ours(one_step, engine="ddp"))
    return facts


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit_as_ddp(name: str, world: int) -> None:
    for facts in ranks.spawn(compare, world, CASES[name], init=world > 1, timeout=110):
        assert facts["layerwise"] == 0.0
        assert facts["same losses"]
        assert facts["replicas"] == 0.0
        assert facts.get("ddp", 0.0) == 0.0
        assert facts["buckets"] > 1


@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks(name: str) -> None:
    case = CASES[name]
    for facts in ranks.spawn(compare_on_many, 4, case, init=True, timeout=110):
        assert facts.get("by hand", 0.0) == 0.0
        assert facts.get("direct", 0.0) == 0.0
        assert facts["replicas"] == 0.0
        assert facts["layerwise"] <= ROUNDING[case.optimizer]
        assert facts["ddp"] <= ROUNDING[case.optimizer]
