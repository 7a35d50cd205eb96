"""Telling a verb's own options from those of the script behind them.

cyclopts takes options wherever they stand. A script's options must reach the script, also those
that the verb has as well, and a misspelt option of the verb must not be taken for the script.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import Parameter

__all__ = ["options_of", "protect_script"]

_MODULE = "-m"
_ALWAYS = {"--help", "-h", "--version"}


def options_of(verb: Callable[..., Any]) -> dict[str, bool]:
    """Every name of every option of a verb, and whether a value follows it."""
    found = dict.fromkeys(_ALWAYS, False)
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            # An option that is off unless it is there has no value; all others have one.
            valued = parameter.default is not False
            found |= dict.fromkeys(_names(parameter), valued)
    return found


def _names(parameter: inspect.Parameter) -> Sequence[str]:
    for given in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(given, Parameter) and given.name:
            return (given.name,) if isinstance(given.name, str) else tuple(given.name)
    return (f"--{parameter.name.replace('_', '-')}",)


def protect_script(
    tokens: Sequence[str], verb: Callable[..., Any], *, words_before: int = 0
) -> list[str]:
    """Put ``--`` before the script, so that its own options are not taken for the verb's.

    Args:
        tokens: the command line, with the verb's name as its first word.
        verb: the function of the verb.
        words_before: how many words, that are no options, stand before the script.

    Returns:
        The tokens as they are if there is no script, ``--`` is there already, or a word before the
        script is an option the verb does not have, for cyclopts to refuse by name.
    """
    options = options_of(verb)
    index = 1
    while index < len(tokens):
        word = tokens[index]
        if word == "--":
            return list(tokens)
        if not word.startswith("-") or word == "-":
            if words_before == 0:
                return [*tokens[:index], "--", *tokens[index:]]
            words_before -= 1
            index += 1
            continue
        if word == _MODULE and _MODULE not in options and words_before == 0:
            return [*tokens[:index], "--", *tokens[index:]]  # of the script, as python has it
        name, equals, _ = word.partition("=")
        if name not in options and not _attached(word, options):
            return list(tokens)
        index += 2 if options.get(name) and not equals else 1
    return list(tokens)


def _attached(word: str, options: dict[str, bool]) -> bool:
    """Whether it is a short option with its value, such as -n2."""
    return not word.startswith("--") and options.get(word[:2], False)
