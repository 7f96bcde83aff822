"""Text of a growing list of token ids, piece by piece. Knows decoders; knows nothing of stop strings.

The pieces a stream gives, joined, are exactly what decoding all ids at once gives, and no piece ends inside a
character. For the decoders nearly every model has, byte level and byte fallback, a token's share is looked up
in a table; anything else is decoded in a small window (as vLLM does). Where a later token may change the text of
any earlier one, the text comes whole at the end.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import tokenizers

from ..errors import RequestError
from .rust_calls import contain
from .tokenizer_parts import components

REPLACEMENT = "\ufffd"
WINDOW_CONTEXT = 6  # prompt tokens a window begins with
MAX_HELD = 16  # tokens a window holds back at most for a character that is not whole; it is decoded again for each
# Steps of a decoder that turn each token into text of its own, which depends at most on whether it is the first.
_OF_ONE_TOKEN = {"Metaspace", "Replace", "Strip", "WordPiece"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """Turns token ids into text; one for each sequence."""

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known."""

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that never became a character."""


class TextDecoder:
    """The decoder of a tokenizer's tokens; shared by all text streams of a model."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]):
        self._backend, self._special_ids = backend, special_ids
        steps = components(backend.decoder)
        kinds = [step.get("type") for step in steps]
        self._table: dict[int, Any] = {}
        self._is_byte_level = kinds == ["ByteLevel"]
        self._suffix: str | None = steps[0]["suffix"] if kinds == ["BPEDecoder"] else None
        self._strips_first = kinds[-1:] == ["Strip"]
        replaced = _byte_fallback_replacements(steps)
        self._is_byte_fallback = replaced is not None
        self._replaced = replaced or []
        self._is_local = _is_local(steps)

    def stream(
        self, skip_special_tokens: bool, prompt_ids: Sequence[int] = (), kept_ids: Collection[int] = ()
    ) -> TextStream:
        """A stream for the ids that follow ``prompt_ids``, which only tell whether the text has begun.

        Special tokens among ``kept_ids`` are not left out.
        """
        skipped = self._special_ids.difference(kept_ids) if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return _ByteLevelStream(self._table, self._bytes_of, skipped)
        if self._is_byte_fallback:
            strips = self._strips_first and not any(i not in skipped for i in prompt_ids)
            return _ByteFallbackStream(self._table, self._piece_of, skipped, strips)
        if self._suffix is not None:
            before = next((i for i in reversed(prompt_ids) if i not in skipped), None)
            return _SuffixStream(self._table, self._halves_of, skipped, before)
        return _WindowStream(self._table, self._is_token, skipped, self._decode, prompt_ids, self._is_local)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token inside a text; None where a token alone does not tell them. Raises RequestError."""
        if self._is_byte_level:
            return self._bytes_of(token_id)
        piece = self._piece_of(token_id) if self._is_byte_fallback else None
        return piece.encode() if isinstance(piece, str) else piece

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._token(token_id)
        piece = b"" if token is None else _byte_level_bytes(token)
        self._table[token_id] = piece
        return piece

    def _piece_of(self, token_id: int) -> str | bytes:
        """Text, or the byte of a byte token; no byte for an id without a token, which does not end a run."""
        token = self._token(token_id)
        piece: str | bytes = b""
        if token is not None:
            for old, new in self._replaced:
                token = token.replace(old, new)
            match = _BYTE_TOKEN.fullmatch(token)
            piece = bytes.fromhex(match[1]) if match else token
        self._table[token_id] = piece
        return piece

    def _halves_of(self, token_id: int) -> tuple[str, str, str] | None:
        """Text of a token of ``BPEDecoder``: for certain, and the rest as the last token and before another one."""
        token = self._token(token_id)
        if token is None:
            return None
        assert self._suffix is not None
        sure = token.split(self._suffix, 1)[0] if self._suffix else ""
        rest = token[len(sure) :]
        halves = self._table[token_id] = sure, rest.replace(self._suffix, ""), rest.replace(self._suffix, " ")
        return halves

    def _is_token(self, token_id: int) -> bool:
        known = self._table[token_id] = self._token(token_id) is not None
        return known

    def _decode(self, ids: list[int]) -> str:
        return contain(
            RequestError, "the tokens cannot be decoded", self._backend.decode, ids, skip_special_tokens=False
        )

    def _token(self, token_id: int) -> str | None:
        return contain(RequestError, "the id cannot be decoded", self._backend.id_to_token, token_id)


class _ByteLevelStream:
    """GPT-2 style: every token is bytes, and the text is their UTF-8."""

    __slots__ = ("_decode", "_lookup", "_skipped", "_table")

    def __init__(self, table: dict[int, bytes], lookup: Callable[[int], bytes], skipped: frozenset[int]):
        self._table, self._lookup, self._skipped = table, lookup, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.get(token_id)
        return self._decode(self._lookup(token_id) if piece is None else piece)

    def finish(self) -> str:
        return self._decode(b"", True)


class _ByteFallbackStream:
    """SentencePiece style: tokens are text, rare characters are runs of byte tokens.

    A run is held until it ends, for one invalid byte turns every byte of its run into U+FFFD.
    """

    __slots__ = ("_lookup", "_run", "_skipped", "_strips", "_table")

    def __init__(
        self,
        table: dict[int, str | bytes],
        lookup: Callable[[int], str | bytes],
        skipped: frozenset[int],
        strips: bool,
    ):
        self._table, self._lookup, self._skipped = table, lookup, skipped
        self._strips = strips  # the text's first character, if it is a space, is the tokenizer's own
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.get(token_id)
        if piece is None:
            piece = self._lookup(token_id)
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._begin(self._end_run() + piece) if self._run or self._strips else piece

    def finish(self) -> str:
        return self._begin(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _begin(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _SuffixStream:
    """GPT-1 style: a suffix ends a word, and stands for a space unless the text ends with it."""

    __slots__ = ("_inside", "_last", "_lookup", "_skipped", "_table")

    def __init__(
        self,
        table: dict[int, tuple[str, str, str]],
        lookup: Callable[[int], tuple[str, str, str] | None],
        skipped: frozenset[int],
        before: int | None,
    ):
        """``before`` is the token that precedes the text, if there is one."""
        self._table, self._lookup, self._skipped = table, lookup, skipped
        self._last = self._inside = ""  # the rest of the newest token, if it is the last and if it is not
        if before is not None:
            self.push(before)
            self._last = ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        halves = self._table.get(token_id) or self._lookup(token_id)
        if halves is None:
            return ""
        held = self._inside
        sure, self._last, self._inside = halves
        return held + sure

    def finish(self) -> str:
        rest, self._last, self._inside = self._last, "", ""
        return rest


class _WindowStream:
    """Any decoder: decodes the last few tokens with and without the newest, and gives the difference.

    With a decoder that is not local, in which a later token may change all text before it, the window is all tokens.
    """

    __slots__ = ("_decode", "_ids", "_is_local", "_lookup", "_read", "_skipped", "_table")

    def __init__(
        self,
        table: dict[int, bool],
        lookup: Callable[[int], bool],
        skipped: frozenset[int],
        decode: Callable[[list[int]], str],
        prompt_ids: Sequence[int],
        is_local: bool,
    ):
        self._is_local = is_local
        self._table, self._lookup, self._skipped, self._decode = table, lookup, skipped, decode
        self._ids = [token_id for token_id in prompt_ids[-WINDOW_CONTEXT:] if token_id not in skipped]
        self._read = len(self._ids)  # ids before it are already given out

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        known = self._table.get(token_id)
        if not (self._lookup(token_id) if known is None else known):
            return ""
        self._ids.append(token_id)
        return self._advance(is_last=False) if self._is_local else ""

    def finish(self) -> str:
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> str:
        given, known = self._decode(self._ids[: self._read]), self._decode(self._ids)
        end = len(self._ids)
        if not is_last and known.endswith(REPLACEMENT):
            if end - self._read < MAX_HELD:
                return ""
            # No character has so many bytes: the first of them stand for themselves, if the rest agrees.
            end -= MAX_HELD // 2
            whole, known = known, self._decode(self._ids[:end])
            if not whole.startswith(known):
                return ""
        if len(known) <= len(given):
            return ""
        del self._ids[: self._read]
        self._read = end - self._read
        return known[len(given) :]


def _is_local(steps: list[dict[str, Any]]) -> bool:
    """Whether a token's text depends on its neighbours alone: no step works on tokens that an earlier one joined."""
    kinds = [step.get("type") for step in steps]
    if kinds in (["BPEDecoder"], ["CTC"]):
        return True
    if kinds[-2:] == ["Fuse", "Strip"] and steps[-1]["start"] <= 1 and steps[-1]["stop"] == 0:
        kinds.pop()
    while kinds[-1:] == ["Fuse"]:
        kinds.pop()
    return _OF_ONE_TOKEN.issuperset(kinds[:-1]) and (_OF_ONE_TOKEN | {"ByteLevel"}).issuperset(kinds[-1:])


def _byte_fallback_replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
    """Replacements of a decoder Replace*, ByteFallback, [Fuse, [Strip one leading space]]; else None."""
    replaced = []
    while steps and steps[0].get("type") == "Replace" and "String" in steps[0]["pattern"]:
        replaced.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    fuse, strip = {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps[:1] != [{"type": "ByteFallback"}] or steps[1:] not in ([], [fuse], [fuse, strip]):
        return None
    return replaced


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; text outside that alphabet (added tokens) stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where printable, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_level_alphabet()
