"""Connections that are used again."""

from __future__ import annotations

import threading

import pytest

from sapwood.channel.connection import Connection
from sapwood.channel.pool import Pool
from tests.channel.places import Place, exchange


def test_a_pool_uses_connections_again_and_notices_dead_ones(place: Place) -> None:
    made: list[Connection] = []

    def dial(_: float | None) -> Connection:
        made.append(place.dial())
        return made[-1]

    pool = Pool(dial, idle=2)
    for _ in range(3):
        with pool.connection() as connection:
            exchange(connection)
    assert len(made) == 1
    made[0].abort()
    with pool.connection() as connection:
        exchange(connection)
    assert len(made) == 2
    with pytest.raises(KeyError), pool.connection(KeyError) as connection:
        raise KeyError
    with pytest.raises(ValueError), pool.connection(KeyError) as connection:
        raise ValueError
    with pool.connection() as connection:
        exchange(connection)
    assert len(made) == 3
    pool.close()
    with pytest.raises(OSError), pool.connection():
        pass


def test_closing_a_pool_wakes_whoever_waits(place: Place) -> None:
    pool = Pool(lambda _: place.dial())
    waits = threading.Event()
    woken: list[BaseException] = []

    def wait() -> None:
        try:
            with pool.connection() as connection:
                waits.set()
                connection.receive(timeout=60.0)
        except OSError as error:
            woken.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(20.0)
    pool.close()
    thread.join(20.0)
    assert len(woken) == 1


def test_how_long_dialling_may_take_is_the_caller_s(place: Place) -> None:
    seconds: list[float | None] = []

    def dial(within: float | None) -> Connection:
        seconds.append(within)
        return place.dial()

    pool = Pool(dial)
    first = pool.take(0.5)
    with pool.connection(timeout=0.25):
        pass
    with pool.connection():  # the one that is idle
        pool.discard(pool.take())
    assert seconds == [0.5, 0.25, None]
    pool.discard(first)
    pool.close()


def test_a_pool_that_is_closed_while_it_dials_keeps_nothing(place: Place) -> None:
    made: list[Connection] = []

    def dial(_: float | None) -> Connection:
        made.append(place.dial())
        pool.close()
        return made[-1]

    pool = Pool(dial)
    with pytest.raises(OSError, match="closed on this side"):
        pool.take()
    with pytest.raises(OSError):
        made[0].send({})
