"""What the answers of ranks that read say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Answers = Sequence[Mapping[str, Any]]
PAGE = 4096


def read_metrics(answers: Answers, *, nbytes: int, count: int) -> dict[str, float]:
    """Of the whole group; it is as slow as its slowest rank."""
    samples = sum(answer["samples"] for answer in answers)
    seconds = max(answer["seconds"] for answer in answers)
    return {
        "rate": samples / seconds / 1e3,
        "bytes": samples * nbytes / seconds / 1e6,
        "cpu": answers[0]["cpu"] / (samples * nbytes / 1e9),
        "first": max(answer["first"] for answer in answers) * 1e3,
        "part": 100 * samples / count,
    }


def policy_metrics(answers: Answers) -> dict[str, float]:
    """What our own reader counted, over all ranks; zeros that only some policies could have go."""
    facts = [answer["facts"] for answer in answers]
    if not all(facts):
        return {}
    total = {name: sum(fact[name] for fact in facts) for name in facts[0]}
    seconds = sum(answer["seconds"] for answer in answers)
    pages = max(total["useful"] / PAGE, 1)
    some = {
        "stagger": 100 * total["stagger"] / seconds,
        "missed": 100 * total["missed"] / pages,
        "redundant": 100 * total["redundant"] / pages,
        "score": facts[0]["score"],
    }
    return {
        "read": total["read"] / max(total["useful"], 1),
        "request": total["read"] / max(total["requests"], 1) / 1024,
        "wait": 100 * total["wait"] / seconds,
        **{name: value for name, value in some.items() if value},
    }


def wrong_records(name: str, answers: Answers, *, count: int, digest: int) -> list[str]:
    """A text if the ranks together did not get each record as often as they should."""
    got = sum(answer["samples"] for answer in answers)
    if got != count:
        return [f"{name}: {got} records instead of {count}"]
    if sum(answer["digest"] for answer in answers) != digest:
        return [f"{name}: the sum of the records' checksums differs"]
    return []
