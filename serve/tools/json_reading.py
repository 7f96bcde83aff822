"""JSON as it comes: values are handed over compact and valid up to any point, whatever follows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from string import hexdigits

import msgspec

from .parser import CallSink
from .source import Emit, Reading, Source, Unreadable

MAX_DEPTH = 48  # levels of a call's arguments; templates take 64 of a conversation
MAX_NUMBER_CHARS = 400  # the longest double has 309 digits before the point
ARGUMENTS = ("arguments", "parameters")  # names of one thing
_CALL_KEYS = frozenset({"name", "type", "id", "function", *ARGUMENTS})
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")


def quoted(text: str) -> str:
    """``text`` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def ignore(text: str) -> None:
    """Takes what nobody wants."""


def read_value(source: Source, emit: Emit, depth: int = MAX_DEPTH) -> Reading[None]:
    """A value of at most ``depth`` levels. Raises ``Unreadable``."""
    char = yield from source.peek()
    if char == '"':
        yield from read_string(source, emit)
    elif char == "{":
        yield from read_object(source, emit, depth)
    elif char == "[":
        yield from _read_array(source, emit, depth)
    else:
        emit((yield from read_scalar(source)))


def read_object(source: Source, emit: Emit, depth: int = MAX_DEPTH) -> Reading[None]:
    """An object. Raises ``Unreadable``."""
    yield from _open(source, "{", emit, depth)
    if (yield from source.takes("}")):
        emit("}")
        return
    char = ","
    while char == ",":
        yield from read_string(source, emit)
        yield from source.space()
        yield from source.expect(":")
        emit(":")
        yield from source.space()
        yield from read_value(source, emit, depth - 1)
        char = yield from _next(source, "}", emit)


def _read_array(source: Source, emit: Emit, depth: int) -> Reading[None]:
    yield from _open(source, "[", emit, depth)
    if (yield from source.takes("]")):
        emit("]")
        return
    char = ","
    while char == ",":
        yield from read_value(source, emit, depth - 1)
        char = yield from _next(source, "]", emit)


def _open(source: Source, bracket: str, emit: Emit, depth: int) -> Reading[None]:
    if depth == 0:
        raise Unreadable
    yield from source.expect(bracket)
    emit(bracket)
    yield from source.space()


def _next(source: Source, closing: str, emit: Emit) -> Reading[str]:
    """The comma behind an item, or the end."""
    yield from source.space()
    char = yield from source.expect_one_of(f",{closing}")
    emit(char)
    if char == ",":
        yield from source.space()
    return char


def read_scalar(source: Source) -> Reading[str]:
    """A number, or a word such as ``true``. Raises ``Unreadable``."""
    text = yield from source.word(_SCALAR, MAX_NUMBER_CHARS)
    if text not in _WORDS and not _NUMBER.fullmatch(text):
        raise Unreadable
    return text


def read_string(source: Source, emit: Emit) -> Reading[None]:
    """A string. Control characters in it, which JSON forbids and models write, are escaped. Raises ``Unreadable``."""
    yield from source.expect('"')
    emit('"')
    while True:
        yield from source.run(_PLAIN, emit)
        char = yield from source.peek()
        if char == '"':
            source.skip()
            emit(char)
            return
        if char == "\\":
            yield from _read_escape(source, emit)
        elif char:
            yield from source.run(_CONTROL, lambda text: emit(quoted(text)))
        else:
            raise Unreadable


def _read_escape(source: Source, emit: Emit) -> Reading[None]:
    """An escape; half a character (a lone surrogate) becomes U+FFFD."""
    source.skip()
    kind = yield from source.expect_one_of('"\\/bfnrtu')
    if kind != "u":
        emit(f"\\{kind}")
        return
    first = yield from _read_hex(source)
    while 0xD800 <= int(first, 16) < 0xDC00 and (yield from source.takes("\\u")):
        second = yield from _read_hex(source)
        if 0xDC00 <= int(second, 16) < 0xE000:
            emit(f"\\u{first}\\u{second}")
            return
        emit("\\ufffd")
        first = second
    emit("\\ufffd" if 0xD800 <= int(first, 16) < 0xE000 else f"\\u{first}")


def _read_hex(source: Source) -> Reading[str]:
    digits = ""
    for _ in range(4):
        digits += yield from source.expect_one_of(hexdigits)
    return digits


def read_text(source: Source) -> Reading[str]:
    """The text of a string. Raises ``Unreadable``."""
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    text: str = msgspec.json.decode("".join(pieces))
    return text


def read_call(
    source: Source, sink: CallSink, accepts: Callable[[str], bool] = bool, keys: Collection[str] | None = None
) -> Reading[None]:
    """A call ``{"name": ..., "arguments": {...}}``, in any order; other fields are left out.

    ``accepts`` tells whether a name can be a tool's, ``keys`` are those that a call may have. Raises ``Unreadable``.
    """
    name, early, has_begun, char = "", list[str](), False, ","
    yield from source.expect("{")
    yield from source.space()
    while char == ",":
        key = yield from read_text(source)
        if keys is not None and key not in keys:
            raise Unreadable
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key == "name" and not name:
            name = yield from read_text(source)
            if not accepts(name):
                raise Unreadable
            if early:
                _begin(sink, name, "".join(early))
                has_begun = True
        elif key in ARGUMENTS and not has_begun and not early:
            if name and (yield from source.peek()) == "{":
                sink.begin(name)
                has_begun = True
            yield from read_object(source, sink.arguments if has_begun else early.append)
        else:
            yield from read_value(source, ignore)
        char = yield from _next(source, "}", ignore)
    if not name:
        raise Unreadable
    if not has_begun:
        _begin(sink, name, "{}")


def read_bare_call(source: Source, sink: CallSink, accepts: Callable[[str], bool]) -> Reading[None]:
    """A call that nothing marks, so that its name must be a tool's, and its fields those of a call."""
    yield from read_call(source, sink, accepts, _CALL_KEYS)


def _begin(sink: CallSink, name: str, arguments: str) -> None:
    sink.begin(name)
    sink.arguments(arguments)
