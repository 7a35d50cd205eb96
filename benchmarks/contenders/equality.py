"""What the parent checks about checkpoints: that they came back bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

Answers = Sequence[Mapping[str, Any]]
NEEDS = {
    "safetensors": "safetensors",
    "torch_checkpointing": "torch_checkpointing",
    "torchsnapshot": "torchsnapshot",
    "torchsnapshot async": "torchsnapshot",
    "dlrover": "dlrover",
    "file safetensors": "safetensors",
    "p2p mpi4py": "mpi4py",
    "torchft http": "torchft",
    "torchft pg": "torchft",
}
"""The package a peer comes from."""


def not_installed(name: str) -> str | None:
    package = NEEDS.get(name)
    if package is None or importlib.util.find_spec(package):
        return None
    return f"{package} is not installed"


def error_in(answers: Answers) -> str | None:
    errors = [answer["error"] for answer in answers if "error" in answer]
    return errors[0].splitlines()[0] if errors else None


def differences(name: str, answers: Answers) -> list[str]:
    """Texts about tensors that did not come back as some rank had them.

    Statistics of BatchNorm differ from rank to rank between two forwards, and one of them is saved.
    """
    found = []
    for rank, answer in enumerate(answers):
        wrong = [
            tensor
            for tensor, digest in answer.get("loaded", {}).items()
            if all(other["live"].get(tensor) != digest for other in answers)
        ]
        missing = answer.get("live", {}).keys() - answer.get("loaded", {}).keys()
        wrong += sorted(missing)
        if wrong:
            found.append(f"{name}, rank {rank}: {len(wrong)} tensors differ, such as {wrong[0]}")
    return found
