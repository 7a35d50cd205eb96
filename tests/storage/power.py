"""What a folder may look like after power was cut: a recorder of file operations, and a replay.

A file system owes us only what was synced: bytes of a file by syncing the file, names in a folder
by syncing the folder. Of everything else any part may survive, in any order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sapwood.storage.files import Files, FileWriter

Op = tuple[str, tuple[Any, ...]]


class RecordingWriter(FileWriter):
    """Writes, and records what was written to which file."""

    def __init__(self, path: Path, fd: int, log: list[Op]) -> None:
        super().__init__(path, fd)
        self._log = log
        self._inode = os.fstat(fd).st_ino

    def resize(self, nbytes: int) -> None:
        super().resize(nbytes)
        self._log.append(("resize", (self._inode, nbytes)))

    def write_at(self, offset: int, data: Any) -> None:
        super().write_at(offset, data)
        self._log.append(("write", (self._inode, offset, bytes(data))))

    def write_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        super().write_parts(offset, parts)
        self._log.append(("write", (self._inode, offset, b"".join(parts))))

    def sync(self) -> None:
        super().sync()
        self._log.append(("sync", (self._inode,)))


class RecordingFiles(Files):
    """Files that record every operation below ``root``; several may share a log."""

    def __init__(self, root: Path, log: list[Op]) -> None:
        super().__init__()
        self._root = root
        self.log = log

    def _add(self, op: str, *paths: Path, more: tuple[Any, ...] = ()) -> None:
        if all(p == self._root or self._root in p.parents for p in paths):
            names = tuple(p.relative_to(self._root).parts for p in paths)
            self.log.append((op, names + more))

    def _writer(self, writer: FileWriter, *, empty: bool) -> RecordingWriter:
        inode = os.fstat(writer._fd).st_ino
        self._add("open", writer.path, more=(inode, empty))
        return RecordingWriter(writer.path, writer._fd, self.log)

    def new_folder(self, path: Path) -> None:
        super().new_folder(path)
        self._add("mkdir", path)

    def create(self, path: Path) -> FileWriter:
        return self._writer(super().create(path), empty=True)

    def draft(self, path: Path, *, direct: bool) -> FileWriter:
        return self._writer(super().draft(path, direct=direct), empty=True)

    def share(self, path: Path) -> FileWriter:
        return self._writer(super().share(path), empty=False)

    def publish(self, draft: Path, final: Path) -> None:
        super().publish(draft, final)
        self._add("rename", draft, final)

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._add("link", source, target)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._add("sync_folder", path)

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._add("remove", path)

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        self._add("remove", path)


@dataclass(eq=False)
class File:
    """Bytes as processes see them, and as they are on the device for sure."""

    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass(eq=False)
class Folder:
    """Names as processes see them, and as they are on the device for sure."""

    names: dict[str, Node] = field(default_factory=dict)
    safe: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[tuple[str, ...], dict[str, Node]]] = field(default_factory=list)
    """Changes since the last sync: names taken away and names given, both or neither."""

    def change(self, gone: tuple[str, ...], new: dict[str, Node]) -> None:
        self.pending.append((gone, new))
        self.names = _changed(self.names, gone, new)


Node = File | Folder


def _changed(
    names: dict[str, Node], gone: tuple[str, ...], new: dict[str, Node]
) -> dict[str, Node]:
    return {**{name: node for name, node in names.items() if name not in gone}, **new}


def _safe_names(folder: Folder, depth: int) -> dict[str, Node]:
    return folder.safe


def _all_names(folder: Folder, depth: int) -> dict[str, Node]:
    return folder.names


def _last_name(folder: Folder, depth: int) -> dict[str, Node]:
    return _changed(folder.safe, *folder.pending[-1]) if folder.pending else folder.safe


def _each_name_but_the_last(folder: Folder, depth: int) -> dict[str, Node]:
    names = folder.safe
    for gone, new in folder.pending[1:]:
        names = _changed(names, gone, new)
    return names


def _inner_names(folder: Folder, depth: int) -> dict[str, Node]:
    return folder.names if depth > 1 else folder.safe


def _outer_names(folder: Folder, depth: int) -> dict[str, Node]:
    return folder.safe if depth > 1 else folder.names


def _zeros(file: File) -> bytes:
    """The size survived, the bytes did not."""
    return file.safe[: len(file.data)].ljust(len(file.data), b"\0")


def _torn(file: File) -> bytes:
    """Half of what was not synced came to the device."""
    half = len(file.data) // 2
    return bytes(file.data[:half]) + file.safe[half:]


Names = Callable[[Folder, int], dict[str, Node]]
Bytes = Callable[[File], bytes]
VARIANTS: dict[str, tuple[Names, Bytes]] = {
    "nothing": (_safe_names, lambda file: file.safe),
    "everything": (_all_names, lambda file: bytes(file.data)),
    "names only": (_all_names, lambda file: file.safe),
    "names and sizes": (_all_names, _zeros),
    "torn": (_all_names, _torn),
    "data only": (_safe_names, lambda file: bytes(file.data)),
    "the last name": (_last_name, lambda file: file.safe),
    "names but the first": (_each_name_but_the_last, lambda file: file.safe),
    "inner names": (_inner_names, lambda file: file.safe),
    "outer names": (_outer_names, lambda file: file.safe),
}


class Replay:
    """The folder tree after some operations, and what may be left of it."""

    def __init__(self) -> None:
        self.root = Folder()
        self._inodes: dict[int, File] = {}

    def apply(self, op: Op) -> None:
        getattr(self, f"_{op[0]}")(*op[1])

    def tree(self, variant: str) -> dict[tuple[str, ...], bytes | None]:
        """Files with their bytes, and folders (None), that are there in a variant."""
        names, data = VARIANTS[variant]
        return dict(self._walk(self.root, (), names, data))

    def _walk(
        self, folder: Folder, at: tuple[str, ...], names: Names, data: Bytes
    ) -> Iterator[tuple[tuple[str, ...], bytes | None]]:
        for name, node in names(folder, len(at)).items():
            if isinstance(node, File):
                yield (*at, name), data(node)
            else:
                yield (*at, name), None
                yield from self._walk(node, (*at, name), names, data)

    def _find(self, path: tuple[str, ...]) -> Node | None:
        node: Node | None = self.root
        for name in path:
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def _folder(self, path: tuple[str, ...]) -> Folder:
        node = self._find(path)
        assert isinstance(node, Folder), path
        return node

    def _mkdir(self, path: tuple[str, ...]) -> None:
        if self._find(path) is None:
            self._folder(path[:-1]).change((), {path[-1]: Folder()})

    def _open(self, path: tuple[str, ...], inode: int, empty: bool) -> None:
        node = self._find(path)
        if node is None:
            node = File()
            self._folder(path[:-1]).change((), {path[-1]: node})
        assert isinstance(node, File)
        if empty:
            node.data.clear()
        self._inodes[inode] = node

    def _resize(self, inode: int, nbytes: int) -> None:
        data = self._inodes[inode].data
        data[nbytes:] = b""
        data.extend(bytes(nbytes - len(data)))

    def _write(self, inode: int, offset: int, content: bytes) -> None:
        data = self._inodes[inode].data
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(content)] = content

    def _sync(self, inode: int) -> None:
        self._inodes[inode].safe = bytes(self._inodes[inode].data)

    def _sync_folder(self, path: tuple[str, ...]) -> None:
        folder = self._folder(path)
        folder.safe = dict(folder.names)
        folder.pending.clear()

    def _rename(self, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        node = self._find(old)
        assert node is not None
        if old[:-1] == new[:-1]:
            self._folder(old[:-1]).change((old[-1],), {new[-1]: node})
        else:  # two changes, of which either may survive
            self._folder(new[:-1]).change((), {new[-1]: node})
            self._folder(old[:-1]).change((old[-1],), {})

    def _link(self, source: tuple[str, ...], target: tuple[str, ...]) -> None:
        node = self._find(source)
        assert node is not None
        self._folder(target[:-1]).change((), {target[-1]: node})

    def _remove(self, path: tuple[str, ...]) -> None:
        node = self._find(path)
        if node is None:
            return
        if isinstance(node, Folder):
            for name in list(node.names):
                self._remove((*path, name))
        self._folder(path[:-1]).change((path[-1],), {})


def build(tree: dict[tuple[str, ...], bytes | None], folder: Path) -> None:
    """Make a tree in an empty folder."""
    folder.mkdir()
    for path, content in tree.items():
        if content is None:
            folder.joinpath(*path).mkdir()
        else:
            folder.joinpath(*path).write_bytes(content)
