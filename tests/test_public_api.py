"""The public surface: light to import, complete, sorted, and with one tree of errors."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import sapwood
from sapwood import errors

PUBLIC_ERRORS = [
    value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__ and not name.startswith("_")
]


@pytest.mark.parametrize("module", ["sapwood", "sapwood.errors", "sapwood.runtime.faults"])
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_all_is_sorted_and_is_what_dir_shows() -> None:
    assert sapwood.__all__ == sorted(sapwood.__all__)
    assert dir(sapwood) == sapwood.__all__


def test_all_is_complete() -> None:
    assert set(sapwood.__all__) == {*sapwood._HOME, *sapwood._PACKAGES, "__version__"}


@pytest.mark.parametrize("name", sorted(sapwood._HOME))
def test_every_public_name_is_where_it_says(name: str) -> None:
    assert getattr(sapwood, name).__name__ == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tree'"):
        sapwood.Tree  # noqa: B018


def test_errors_export_all_they_define() -> None:
    assert sorted(errors.__all__) == sorted(error.__name__ for error in PUBLIC_ERRORS)


@pytest.mark.parametrize("error", PUBLIC_ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_ours_documented_and_in_the_tree(error: type[Exception]) -> None:
    assert issubclass(error, errors.SapwoodError)
    assert error.__doc__
    assert drawn_parent(error.__name__) == ours(error)


def ours(error: type[Exception]) -> str | None:
    parents = [base.__name__ for base in error.__bases__ if issubclass(base, errors.SapwoodError)]
    return parents[0] if parents else None


def drawn_parent(name: str) -> str | None:
    """The parent of ``name`` in the tree drawn in the docstring of errors.py."""
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", "   ").replace("└──", "   ")
        if words.split()[:1] and words.split()[0] in errors.__all__:
            depth = len(words) - len(words.lstrip())
            above = {level: error for level, error in above.items() if level < depth}
            if words.split()[0] == name:
                return above[max(above)] if above else None
            above[depth] = words.split()[0]
    raise AssertionError(f"{name} is not in the tree drawn in errors.py")
