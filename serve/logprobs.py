"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from qkv_engine import Logprob

Entry = dict[int, Logprob]  # by token id, the token itself among them


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry | None], number: int) -> dict[str, Any]:
    """``logprobs`` of a chat's choice; ``number`` of the likeliest tokens stand in ``top_logprobs``."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert entry is not None  # as those of outputs are
        top = [_token(other) for other in _likeliest(entry)[:number]]
        content.append({**_token(entry[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    number: int,
    offset: int,
    text_of: Callable[[int], str] | None,
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice, whose tokens begin at character ``offset``.

    ``top_logprobs`` are ``number`` of the likeliest tokens and, as in OpenAI's API, the token itself. A prompt's first
    token has None for an entry, and ``text_of`` gives its text.
    """
    pairs = list(zip(token_ids, entries, strict=True))
    texts = [_text(e[i]) if e is not None else text_of(i) if text_of else "" for i, e in pairs]
    return {
        "tokens": texts,
        "token_logprobs": [None if e is None else e[i].logprob for i, e in pairs],
        "top_logprobs": [e and _top(e) for _, e in pairs] if number else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


def _top(entry: Entry) -> dict[str, float]:
    return {_text(other): other.logprob for other in _likeliest(entry)}


def _likeliest(entry: Entry) -> list[Logprob]:
    return sorted(entry.values(), key=lambda found: found.rank)


def _text(found: Logprob) -> str:
    return found.decoded_token or ""


def _token(found: Logprob) -> dict[str, Any]:
    text = _text(found)
    return {"token": text, "logprob": found.logprob, "bytes": list(text.encode("utf-8", "replace"))}
