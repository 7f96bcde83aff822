"""Marks in place of special tokens that a user wrote out, which so stay ordinary text in a chat template.

A mark is the number of a special token between two noncharacters, which no text may hold. The template sees the mark
instead of the token, and after rendering every mark becomes the token's text again, at a known place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

BEGIN, END = "\ufdd0", "\ufdd1"  # of a mark: noncharacters, which no text holds
_MARKED = re.compile(f"{BEGIN}([0-9]{{1,7}}){END}")  # seven digits: more special tokens than a tokenizer may have
_Trie = dict[str, "_Trie"]


def clean(text: str) -> str:
    """``text`` with U+FFFD for the noncharacters that marks are made of."""
    return text.replace(BEGIN, "\ufffd").replace(END, "\ufffd")


class SpecialMarks:
    """The special tokens of one tokenizer, by number."""

    def __init__(self, texts: Iterable[str]):
        self._texts = [text for text in dict.fromkeys(texts) if text]
        self._marks = {text: f"{BEGIN}{i}{END}" for i, text in enumerate(self._texts)}
        self._pattern = re.compile(_trie_pattern(self._texts) or "(?!)")

    def mark(self, text: str) -> str:
        """``text``, clean, with a mark for every special token in it; a token before one that it contains."""
        return self._pattern.sub(lambda found: self._marks[found[0]], clean(text))

    def unmark(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """A rendered text with its tokens written out, and where those from marks begin and end, in order."""
        if BEGIN not in text and END not in text:
            return text, []
        pieces = _MARKED.split(text)  # text, number, text, number, ..., text
        parts, length, spans = [clean(pieces[0])], len(pieces[0]), []
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            known = int(number) < len(self._texts)
            token = self._texts[int(number)] if known else "\ufffd"  # a template made the mark up
            spans.append((length, length + len(token)))
            parts += [token, clean(piece)]
            length += len(token) + len(piece)
        return "".join(parts), spans


def _trie_pattern(texts: Iterable[str]) -> str:
    """A pattern of all ``texts``, longest first, that looks at each character once however many there are."""
    root: _Trie = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _node_pattern(root)


def _node_pattern(node: _Trie) -> str:
    shared = ""
    while len(node) == 1 and "" not in node:  # a run without a branch needs no group
        ((char, node),) = node.items()
        shared += re.escape(char)
    branches = [re.escape(char) + _node_pattern(child) for char, child in node.items() if char]
    if not branches:
        return shared
    return f"{shared}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
