"""What every keeper must do; run it on each, also on those of others.

    @pytest.mark.parametrize("check", storage.CHECKS)
    def test_my_keeper(check, tmp_path):
        check(functools.partial(MyKeeper, tmp_path))

    def test_my_keeper_with_several_processes(tmp_path):
        storage.check_racing_writers(functools.partial(MyKeeper, tmp_path))
        storage.check_killed_writer(functools.partial(MyKeeper, tmp_path))

Each check opens an empty place and raises when the keeper does not keep the contract of
``sapwood.storage.base``. Those of ``CHECKS`` need one process; those of a capability (``mapping``,
``sharing``, ``links``, ``adopting``) are for keepers that have it.
"""

from __future__ import annotations

from sapwood.testing.storage.common import Opener
from sapwood.testing.storage.putting import (
    check_drafts,
    check_durability,
    check_keys,
    check_list,
    check_publishing,
    check_remove,
    check_replacing,
    check_round_trip,
    check_threads,
)
from sapwood.testing.storage.reading import (
    check_adopting,
    check_cannot_map,
    check_links,
    check_mapping,
    check_ranges,
    check_sharing,
)
from sapwood.testing.storage.writers import (
    check_killed_writer,
    check_no_leftovers,
    check_racing_writers,
)

__all__ = [
    "CHECKS",
    "Opener",
    "check_adopting",
    "check_cannot_map",
    "check_drafts",
    "check_durability",
    "check_keys",
    "check_killed_writer",
    "check_links",
    "check_list",
    "check_mapping",
    "check_no_leftovers",
    "check_publishing",
    "check_racing_writers",
    "check_ranges",
    "check_remove",
    "check_replacing",
    "check_round_trip",
    "check_sharing",
    "check_threads",
]

CHECKS = (
    check_round_trip,
    check_keys,
    check_publishing,
    check_replacing,
    check_drafts,
    check_durability,
    check_list,
    check_remove,
    check_ranges,
    check_threads,
    check_no_leftovers,
)
