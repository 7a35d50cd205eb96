"""What every back end of a model repository must do; run it on each, also on those of others.

    @pytest.mark.parametrize("check", repository.CHECKS)
    def test_my_backend(check, tmp_path):
        check(functools.partial(open_mine, tmp_path))

    def test_my_backend_with_several_processes(tmp_path):
        for check in repository.PROCESS_CHECKS:
            check(functools.partial(open_mine, tmp_path / check.__name__))

Each check opens an empty place and raises when the back end does not keep the contract of
``sapwood.repository.base``. Those of ``CHECKS`` need one process. Those of ``PROCESS_CHECKS`` open
the place in several, and kill some: the opener must be importable, and its place shared between
processes. Those of ``DAMAGE_CHECKS`` change stored bytes by a function of yours, where the back end
has no attribute ``keeper`` with packs in it.
"""

from __future__ import annotations

from sapwood.testing.repository.care import (
    check_damage,
    check_gc,
    check_shared_bytes,
    check_truncated,
)
from sapwood.testing.repository.common import Harm, Opener, harm_packs
from sapwood.testing.repository.keeping import (
    check_closed,
    check_names,
    check_nothing_of_what_failed,
    check_round_trip,
    check_tags,
    check_threads,
    check_unknown,
)
from sapwood.testing.repository.lineage import check_kin, check_lineage
from sapwood.testing.repository.processes import (
    check_gc_beside_others,
    check_killed_savers,
    check_racing_savers,
)

__all__ = [
    "CHECKS",
    "DAMAGE_CHECKS",
    "PROCESS_CHECKS",
    "Harm",
    "Opener",
    "check_closed",
    "check_damage",
    "check_gc",
    "check_gc_beside_others",
    "check_killed_savers",
    "check_kin",
    "check_lineage",
    "check_names",
    "check_nothing_of_what_failed",
    "check_racing_savers",
    "check_round_trip",
    "check_shared_bytes",
    "check_tags",
    "check_threads",
    "check_truncated",
    "check_unknown",
    "harm_packs",
]

CHECKS = (
    check_round_trip,
    check_names,
    check_tags,
    check_unknown,
    check_nothing_of_what_failed,
    check_lineage,
    check_kin,
    check_shared_bytes,
    check_gc,
    check_threads,
    check_closed,
)
DAMAGE_CHECKS = (check_damage, check_truncated)
PROCESS_CHECKS = (check_racing_savers, check_killed_savers, check_gc_beside_others)
