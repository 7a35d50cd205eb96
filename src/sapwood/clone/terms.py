"""The terms of a fork, as donor 0 sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood.clone.manifest import Manifest, versions
from sapwood.clone.places import Places
from sapwood.clone.plan import Key
from sapwood.runtime.handle import RunHandle
from sapwood.state.contents import Contents
from sapwood.state.kinds import group_members, name_of, name_of_scheduler
from sapwood.tiers.digest import DEFAULT_ALGORITHM
from sapwood.transport.choose import resolve

__all__ = ["make_manifest", "owners_of_buckets"]


def make_manifest(
    run: RunHandle, contents: Contents, session: str, places: Places, asked: Mapping[str, Any]
) -> Manifest:
    """What clones must know to receive this run; ``places`` are those of all, donors first."""
    place = {entry.key: n for n, entry in enumerate(contents.catalog.entries)}
    buckets = [tuple(place[key] for key in bucket) for bucket in _buckets(run, contents)]
    groups = group_members(contents.parameters, run.optimizer)
    approach = str(asked["approach"])
    transport = resolve(str(asked["transport"]), places.machines, places.devices)
    relay = approach in ("deepclone", "lazy") and transport not in ("memory", "nccl")
    # Only a donor's own link knows other memory than the CPU's.
    on_cpu = relay or approach == "file"
    manifest = Manifest(
        run=run.id,
        session=session,
        donors=run.group.world,
        clones=len(places.hosts) - run.group.world,
        hosts=places.hosts,
        machines=places.machines,
        devices=("cpu",) * len(places.hosts) if on_cpu else places.devices,
        approach=approach,
        transport=transport,
        relay=relay,
        algorithm=DEFAULT_ALGORITHM,
        versions=versions(),
        catalog=tuple(contents.catalog.to_json()),
        buckets=tuple(buckets),
        optimizer=name_of(type(run.optimizer)),
        groups=tuple(tuple(place["model", name] for name in names) for names in groups),
        schedulers=tuple(name_of_scheduler(one) for one in run.schedulers),
    )
    return replace(manifest, digest=manifest.plan().digest)


def _buckets(run: RunHandle, contents: Contents) -> list[list[Key]]:
    """Keys by bucket, in the order of updates; what belongs to no bucket comes last."""
    buckets = [
        [key for name in names for key in contents.by_parameter[name]] for names in run.buckets
    ]
    known = {key for bucket in buckets for key in bucket}
    rest = [key for key in contents.tensors if key not in known]
    return [bucket for bucket in [*buckets, rest] if bucket]


def owners_of_buckets(manifest: Manifest, contents: Contents) -> list[set[str]]:
    """The parameters that each bucket of the manifest waits for."""
    keys = [entry.key for entry in contents.catalog.entries]
    owner = {key: name for name, some in contents.by_parameter.items() for key in some}
    return [{owner[keys[n]] for n in bucket if keys[n] in owner} for bucket in manifest.buckets]
