"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from qkv_engine import Logprob

Entry = dict[int, Logprob]  # by token id, the token itself among them


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], number: int, bytes_of: Callable[[int], bytes]
) -> dict[str, Any]:
    """``logprobs`` of a chat's choice; ``number`` of the likeliest tokens stand in ``top_logprobs``.

    ``bytes_of`` gives a token's bytes, which may be a part of a character.
    """

    def shown(token_id: int, found: Logprob) -> dict[str, Any]:
        return {"token": _text(found), "logprob": found.logprob, "bytes": list(bytes_of(token_id))}

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [shown(*pair) for pair in _likeliest(entry)[:number]]
        content.append({**shown(token_id, entry[token_id]), "top_logprobs": top})
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
    """Log-probabilities by text; of tokens with equal texts, such as parts of characters, that of the likeliest."""
    found: dict[str, float] = {}
    for _, other in _likeliest(entry):
        found.setdefault(_text(other), other.logprob)
    return found


def _likeliest(entry: Entry) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda pair: pair[1].rank)


def _text(found: Logprob) -> str:
    return found.decoded_token or ""
