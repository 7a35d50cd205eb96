"""``sapwood store tag``, ``untag``, ``rm``, ``gc`` and ``verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import At, Json, opened
from sapwood.cli.words import size
from sapwood.errors import ConfigError

__all__ = ["gc", "rm", "tag", "untag", "verify"]


def tag(model: str, tag: str, /, *, at: At = None) -> None:
    """Make a tag point to a version; it moves if it pointed to another one.

    ```
    sapwood store tag nt3/run7@12 best
    ```

    Args:
        model: `name@version`, or a name for its latest version.
        tag: The tag.
        at: The repository.
    """
    with opened(at) as repo:
        print(f"{tag} is {repo.tag(model, tag).reference} now")


def untag(model: str, /, *, at: At = None) -> None:
    """Remove a tag; the version it pointed to stays.

    ```
    sapwood store untag nt3/run7@best
    ```

    Args:
        model: `name@tag`.
        at: The repository.
    """
    name, sign, tag = model.partition("@")
    if not sign:
        raise ConfigError(f"{model!r} has no tag; expected name@tag")
    with opened(at) as repo:
        repo.untag(name, tag)
    print(f"{name} has no tag {tag} any more")


def rm(*models: str, at: At = None, yes: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Remove versions; without `--yes` it only says what would go.

    What other versions share with them stays. `sapwood store gc` gives back the room of the rest.

    ```
    sapwood store rm nt3/run7@3 nt3/run7@4 --yes
    ```

    Args:
        models: `name@version`: the version must be named.
        at: The repository.
        yes: Remove them.
    """
    if not models:
        raise ConfigError("say which versions are to go, such as nt3/run7@3")
    named = [_whole(model) for model in models]
    with opened(at) as repo:
        found = [repo.info(model) for model in named]
        for record in {record.id: record for record in found}.values():
            verb = "removed" if yes else "would remove"
            if yes:
                repo.remove(str(record.reference))
            print(f"{verb} {record.reference} ({size(record.nbytes)})")
    if not yes:
        print("nothing was removed; add --yes to do it")
    return 0


def _whole(model: str) -> str:
    if "@" not in model:
        raise ConfigError(f"{model!r} names no version; to be removed it must, as {model}@3")
    return model


def gc(*, at: At = None, json: Json = False) -> None:
    """Give back the room of what no version needs; others may read and save meanwhile.

    ```
    sapwood store gc
    ```

    Args:
        at: The repository.
        json: Write JSON instead of text.
    """
    import sys

    from sapwood.cli.output import print_json

    with opened(at) as repo:
        swept = repo.gc(said=lambda line: print(f"{line} ...", file=sys.stderr))
    if json:
        print_json(asdict(swept))
        return
    freed = size(max(swept.freed, 0))
    print(f"{swept.packs} packs removed, {freed} freed, {size(swept.live)} in use")
    if swept.drafts:
        print(f"{swept.drafts} saves that never ended were cleared away")


def verify(*, at: At = None, json: Json = False) -> int:
    """Read every byte and compare it with its digest; count every reference.

    The exit code is 1 if something is damaged or missing.

    ```
    sapwood store verify
    ```

    Args:
        at: The repository.
        json: Write JSON instead of text.
    """
    from sapwood.cli.output import print_json

    with opened(at) as repo:
        repo.flush()
        found = repo.verify()
    if json:
        print_json(asdict(found))
        return int(bool(found.problems))
    for problem in found.problems:
        print(problem)
    verdict = f"{len(found.problems)} problems" if found.problems else "all sound"
    print(f"{found.models} versions, {found.blobs} tensors, {size(found.nbytes)} read: {verdict}")
    return int(bool(found.problems))
