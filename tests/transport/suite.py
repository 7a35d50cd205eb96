"""Every check of the shipped suite, as tests; a transport's module inherits them."""

from __future__ import annotations

import pytest

from sapwood.testing import transport
from sapwood.transport.base import Opener


class Suite:
    opener: Opener

    @pytest.mark.parametrize(("donors", "receivers"), [(1, 1), (2, 3), (3, 2)])
    def test_every_size_arrives_bit_for_bit(self, donors: int, receivers: int) -> None:
        transport.check_moves_bytes(self.opener, donors, receivers)

    def test_many_messages_in_any_order_and_both_ways(self) -> None:
        transport.check_ways_of_posting(self.opener)

    def test_threads_share_a_link(self) -> None:
        transport.check_threads(self.opener)

    def test_a_peer_that_does_not_come_is_told_in_time(self) -> None:
        transport.check_late_peer(self.opener)

    def test_a_killed_peer_is_told_soon(self) -> None:
        transport.check_lost_peer(self.opener)

    def test_a_killed_donor_is_told_soon(self) -> None:
        transport.check_lost_donor(self.opener)

    def test_a_stopped_peer_costs_the_timeout_only(self) -> None:
        transport.check_stopped_peer(self.opener)

    def test_a_closed_link_leaves_nothing(self) -> None:
        transport.check_no_leftovers(self.opener)
