"""From the text of a search to what it asks of a version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from sapwood.errors import ConfigError
from sapwood.repository.base import ModelRecord
from sapwood.repository.names import nearest
from sapwood.runtime.durations import parse_seconds
from sapwood.store.finding.terms import (
    OPERATORS,
    AllOf,
    AnyOf,
    Has,
    Metric,
    Not,
    Number,
    Term,
    Text,
)
from sapwood.store.finding.words import Word, parse_date, parse_number, parse_size, split

__all__ = ["parse_expression"]

_DEEPEST = 50
"""Parentheses in parentheses; each takes some of Python's own stack."""
_KEYWORDS = ("and", "or", "not", "has")
_TEXTS: dict[str, Callable[[ModelRecord], Sequence[str]]] = {
    "name": lambda record: (record.name,),
    "version": lambda record: (record.version,),
    "tag": lambda record: record.tags,
}
_NUMBERS: dict[str, Callable[[ModelRecord], float]] = {
    "size": lambda record: record.nbytes,
    "tensors": lambda record: record.tensors,
    "created": lambda record: record.created,
    "age": lambda record: time.time() - record.created,
}
_VALUES: dict[str, Callable[[str], float]] = {
    "size": parse_size,
    "tensors": parse_number,
    "created": parse_date,
    "age": partial(parse_seconds, what="age"),
}


def parse_expression(text: str) -> Term:
    """What an expression asks.

    Raises:
        ConfigError: it cannot be read; says where and what was expected.
    """
    parser = _Parser(text)
    found = parser.either()
    parser.end()
    return found


class _Parser:
    """Reads an expression from left to right; ``and`` binds closer than ``or``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = split(text)
        self._at = 0
        self._depth = 0

    def either(self) -> Term:
        terms = [self._both()]
        while self._take_keyword("or"):
            terms.append(self._both())
        return terms[0] if len(terms) == 1 else AnyOf(terms)

    def end(self) -> None:
        if self._at < len(self._words):
            word = self._words[self._at]
            raise self._wrong(word, "expected 'and', 'or' or the end")

    def _both(self) -> Term:
        terms = [self._one()]
        while self._take_keyword("and"):
            terms.append(self._one())
        return terms[0] if len(terms) == 1 else AllOf(terms)

    def _one(self) -> Term:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ConfigError(f"an expression is nested more than {_DEEPEST} times; write it flat")
        try:
            return self._term()
        finally:
            self._depth -= 1

    def _term(self) -> Term:
        if self._take_keyword("not"):
            return Not(self._one())
        if self._take_keyword("has"):
            return Has(self._name().text.removeprefix("metric."))
        word = self._next("a term")
        if word.kind == "paren" and word.text == "(":
            inside = self.either()
            close = self._next("')'")
            if close.kind != "paren" or close.text != ")":
                raise self._wrong(close, "expected ')'")
            return inside
        self._at -= 1
        return self._comparison()

    def _comparison(self) -> Term:
        subject = self._name()
        sign = self._next("an operator, such as < or =")
        if sign.kind != "op":
            raise self._wrong(sign, "expected an operator, such as < or =")
        value = self._next("a value")
        if value.kind not in ("word", "quoted"):
            raise self._wrong(value, "expected a value")
        field = subject.text if subject.kind == "word" else ""
        if field in _TEXTS:
            return self._about_text(field, sign, value)
        if sign.text == "~":
            raise self._wrong(sign, "~ is for patterns of name, version and tag")
        compare = OPERATORS[sign.text]
        if field in _NUMBERS:
            if field in ("created", "age") and sign.text not in ("<", "<=", ">", ">="):
                raise self._wrong(sign, f"{field} is never equal to anything: use < or >")
            return Number(_NUMBERS[field], compare, _VALUES[field](value.text))
        name = subject.text.removeprefix("metric.") if field else subject.text
        return Metric(name, compare, parse_number(value.text))

    def _about_text(self, field: str, sign: Word, value: Word) -> Term:
        wanted = value.text
        if sign.text == "~":
            return Text(_TEXTS[field], lambda word: fnmatchcase(word, wanted))
        equal = Text(_TEXTS[field], lambda word: word == wanted)
        if sign.text in ("=", "=="):
            return equal
        if sign.text == "!=":
            return Not(equal)
        raise self._wrong(sign, f"expected =, != or ~ after {field}")

    # -- words -------------------------------------------------------------------------------

    def _name(self) -> Word:
        word = self._next("a metric, or one of " + ", ".join((*_TEXTS, *_NUMBERS)))
        if word.kind not in ("word", "quoted") or not word.text:
            raise self._wrong(word, "expected a metric, or name, version, tag, size, ...")
        if word.kind == "word" and word.text.lower() in _KEYWORDS:
            raise self._wrong(word, "expected a metric or a field; one called so goes in quotes")
        return word

    def _next(self, expected: str) -> Word:
        if self._at == len(self._words):
            raise ConfigError(f"{self._text!r} ends too early: expected {expected}")
        self._at += 1
        return self._words[self._at - 1]

    def _take_keyword(self, keyword: str) -> bool:
        if self._at < len(self._words):
            word = self._words[self._at]
            if word.kind == "word" and word.text.lower() == keyword:
                self._at += 1
                return True
        return False

    def _wrong(self, word: Word, why: str) -> ConfigError:
        like = nearest(word.text, _KEYWORDS) if word.kind == "word" else ""
        return ConfigError(
            f"{self._text!r} cannot be read at {word.text!r}, character {word.at + 1}: {why}{like}"
        )
