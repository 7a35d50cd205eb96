"""Tokens in files: for their owner only, made once, and never waited for."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sapwood.errors import ConfigError
from sapwood.runtime.tokens import read_or_make_token, read_token


@pytest.mark.parametrize("read", [read_token, read_or_make_token])
def test_what_is_no_file_is_refused_at_once(read: object, tmp_path: Path) -> None:
    assert callable(read)
    fifo, folder = tmp_path / "fifo", tmp_path / "folder"
    os.mkfifo(fifo, 0o600)
    folder.mkdir(mode=0o700)
    for path, kind in ((fifo, "a FIFO"), (folder, "a folder")):
        with pytest.raises(ConfigError, match=kind):
            read(path)
    with pytest.raises(ConfigError, match="cannot read the token"):
        read(tmp_path / "none" / "token")


def test_of_several_at_the_same_time_one_makes_it(tmp_path: Path) -> None:
    def start(_: int) -> str | None:
        try:
            return read_or_make_token(tmp_path / "token")[0]
        except ConfigError:  # between the making of the file and the writing of the token
            return None

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(start, range(8))) - {None}
    assert found == {read_token(tmp_path / "token")}
