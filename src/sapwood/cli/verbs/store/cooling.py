"""``sapwood store cool``."""

from __future__ import annotations

from dataclasses import asdict

from sapwood.cli.verbs.store.place import At, Json, opened
from sapwood.cli.words import size

__all__ = ["cool"]


def cool(
    pattern: str = "*",
    /,
    *,
    at: At = None,
    older_than: str = "0s",
    chain: int = 8,
    json: Json = False,
) -> None:
    """Keep tensors as what differs from the version they come from, compressed with zstd.

    Models are loaded as before, only slower. Tensors for which it does not save a tenth stay as
    they are. Each is read back and compared with its digest before its plain form may go.

    ```
    sapwood store cool 'nt3/*' --older-than 30d
    sapwood store gc                             give back the room
    ```

    Args:
        pattern: Of names of models.
        at: The repository.
        older_than: Only versions that are older: 90s, 15m, 1h, 30d.
        chain: How many tensors may differ from each other in a row; more take less room, and longer
            to load.
        json: Write JSON instead of text.
    """
    import sys

    from sapwood.cli.output import print_json
    from sapwood.runtime.durations import parse_seconds

    seconds = parse_seconds(older_than, "--older-than")
    with opened(at) as repo:
        done = repo.cool(
            pattern,
            older_than=seconds,
            chain=chain,
            said=lambda line: print(f"{line} ...", file=sys.stderr),
        )
    if json:
        print_json(asdict(done))
        return
    print(
        f"{done.tensors} tensors of {done.versions} versions take {size(done.after)} instead of "
        f"{size(done.before)}; {done.kept} stay as they are"
    )
    if done.tensors:
        print("the room is free after `sapwood store gc`")
