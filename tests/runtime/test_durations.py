from __future__ import annotations

import pytest

from sapwood.errors import ConfigError
from sapwood.runtime.durations import parse_seconds, show_seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("10min", 600.0),
        ("10m", 600.0),
        ("1h", 3600.0),
        ("3h55m", 14100.0),
        ("1d 2h", 93600.0),
        ("1.5H", 5400.0),
        ("1h30m15s", 5415.0),
        ("0s", 0.0),
    ],
)
def test_times_as_people_write_them(value, seconds):
    assert parse_seconds(value, "x") == seconds


@pytest.mark.parametrize(
    "value", ["", "soon", "10 minutes", "-5s", -1, "5m1h", "1h1h", "1h30", "h", "nan", True, None]
)
def test_anything_else_is_refused_with_an_example(value):
    with pytest.raises(ConfigError, match=r'time_limit is .*expected seconds or .*"3h55m"'):
        parse_seconds(value, "time_limit")


def test_infinity_is_not_a_length_of_time():
    with pytest.raises(ConfigError):
        parse_seconds(float("inf"), "x")


@pytest.mark.parametrize("text", ["45s", "10m", "3h55m", "1d2h", "0.5s", "1h5s"])
def test_shown_as_it_is_read(text):
    assert show_seconds(parse_seconds(text, "x")) == text
