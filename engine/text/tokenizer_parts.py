"""Checks of a tokenizer's components, so that no tokenizer.json makes a short text long or decoding slow.

A text runs through the normalizer and the pre-tokenizer, its ids through the post-processor, and each token that a
model generates through the decoder, in the engine's own thread. Every component is looked up by type; an unknown one is
refused, since nobody has checked how far it can lengthen a text.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..errors import ModelError
from .rust_calls import contain

MAX_TOKEN_ID = (1 << 22) - 1  # the largest vocabularies have a million; the library counts up to the largest id
MAX_SPECIAL_CHARS = 128  # of one special token; the search for them is nested as deeply
MAX_COMPONENTS = 64  # of the normalizer, pre-tokenizer, post-processor or decoder; each is a pass over the text
MAX_PART_BYTES = 1 << 20  # of one of the four as JSON; a precompiled normalizer takes half of it
MAX_LENGTHENING = 256  # times that normalizing may lengthen a text, or decoding a token
MAX_TEXT_CHARS = 1 << 23  # of a text; the library takes 200 bytes a character
MAX_NORMALIZED_CHARS = 1 << 25  # of a text when it is as long as normalizing can make it
MAX_EXTRA_IDS = 64  # ids that post-processing adds to a text

_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")
# Component types by part; a new one is added once its growth is known to `_lengthening` and `_shortening`.
_NORMALIZING = {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"}
_NORMALIZING |= {"Prepend", "Replace", "Strip", "StripAccents"}
_SPLITTING = {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace"}
_SPLITTING |= {"Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
_PROCESSING = {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}
_DECODING = {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_KEEPS_LENGTH = {"ByteLevel", "Digits", "FixedLength", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend"}
_KEEPS_LENGTH |= {"UnicodeScripts"}
_COMPOSED_CHARS = 4  # the most that NFC and NFKC join into one


@dataclass(frozen=True)
class TokenizerLimits:
    """Bounds on the sizes of texts that follow from a tokenizer's components.

    ``chars_per_token`` is the most characters that can become one token; ``None`` where there is no bound. Where
    ``drops_spaces``: spaces beside a special token can vanish, and the bound does not count them.
    """

    vocab_size: int
    max_chars: int
    chars_per_token: int | None
    drops_spaces: bool


def check_tokenizer(backend: tokenizers.Tokenizer) -> TokenizerLimits:
    """Raises ModelError for ids out of bounds and for components that could lengthen a text without bound."""
    vocab = backend.get_vocab(with_added_tokens=True)
    largest = max(vocab.values(), default=-1)
    if largest > MAX_TOKEN_ID:
        raise ModelError(f"tokenizer.json: the token id {largest} is larger than {MAX_TOKEN_ID}")
    added = backend.get_added_tokens_decoder().values()
    if any(token.special and len(token.content) > MAX_SPECIAL_CHARS for token in added):
        raise ModelError(f"tokenizer.json: a special token has more than {MAX_SPECIAL_CHARS} characters")
    parts = [*_known(backend.normalizer, _NORMALIZING), *_known(backend.pre_tokenizer, _SPLITTING)]
    lengthening = math.prod(map(_lengthening, parts))
    if lengthening > MAX_LENGTHENING:
        raise ModelError("tokenizer.json: its replacements lengthen a text without bound")
    if sum(map(_extra_ids, _known(backend.post_processor, _PROCESSING))) > MAX_EXTRA_IDS:
        raise ModelError("tokenizer.json: its post-processor lengthens a text without bound")
    _check_decoder(_known(backend.decoder, _DECODING))
    return TokenizerLimits(
        vocab_size=largest + 1,
        max_chars=min(MAX_TEXT_CHARS, MAX_NORMALIZED_CHARS // lengthening),
        chars_per_token=_chars_per_token(backend, vocab, parts),
        drops_spaces=any(token.lstrip or token.rstrip for token in added),
    )


def components(part: Any) -> list[dict[str, Any]]:
    """The normalizer, pre-tokenizer, post-processor or decoder ``part`` as its simple components, in order."""
    if part is None:
        return []
    state = contain(ModelError, "tokenizer.json: a component cannot be read", part.__getstate__)
    if len(state) > MAX_PART_BYTES:
        raise ModelError(f"tokenizer.json: a component has more than {MAX_PART_BYTES} bytes")
    try:
        return list(_leaves(json.loads(state)))
    except RecursionError as error:
        raise ModelError("tokenizer.json: its components are nested too deeply") from error


def _leaves(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state.get("type") != "Sequence":
        yield state
        return
    for name in _CHILDREN:
        for child in state.get(name) or ():
            yield from _leaves(child)


def _known(part: Any, types: set[str]) -> list[dict[str, Any]]:
    found = components(part)
    if len(found) > MAX_COMPONENTS:
        raise ModelError(f"tokenizer.json: {len(found)} components in a row; {MAX_COMPONENTS} are allowed")
    for component in found:
        if component.get("type") not in types:
            raise ModelError("tokenizer.json: a component is not known", field="type", value=component.get("type"))
    return found


def _check_decoder(parts: list[dict[str, Any]]) -> None:
    if any("Regex" in part.get("pattern", {}) for part in parts):
        raise ModelError("tokenizer.json: its decoder searches by regular expression, which may take for ever")
    if math.prod(map(_lengthening, parts)) > MAX_LENGTHENING:
        raise ModelError("tokenizer.json: its decoder lengthens a text without bound")


def _lengthening(part: dict[str, Any]) -> int:
    """The factor by which a component can lengthen a text, at most, beside a constant of its type."""
    if part["type"] == "Prepend":
        return 1 + len(part["prepend"])
    if part["type"] == "Precompiled":
        return _longest_replacement(part["precompiled_charsmap"])
    if part["type"] != "Replace":
        return 1
    pattern = part["pattern"].get("String")
    # a regular expression, or an empty pattern, matches between any two characters
    return max(1, -(-len(part["content"]) // len(pattern))) if pattern else 1 + len(part["content"])


def _longest_replacement(charsmap: str) -> int:
    """Bytes of the longest text that a SentencePiece character map puts in place of a character.

    A map is the size of a trie in four bytes, the trie, and the replacements, each ended by a zero byte.
    """
    data = b64decode(charsmap)
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))


def _extra_ids(part: dict[str, Any]) -> int:
    """Ids that a post-processor adds to those of a text; many if it repeats the text itself."""
    if part["type"] != "TemplateProcessing":
        return 2
    pieces = part["single"]
    if sum("Sequence" in piece for piece in pieces) > 1:
        return MAX_EXTRA_IDS + 1
    specials = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    return sum(len(part["special_tokens"][name]["ids"]) for name in specials if name in part["special_tokens"])


def _chars_per_token(backend: tokenizers.Tokenizer, vocab: dict[str, int], parts: list[dict[str, Any]]) -> int | None:
    """Bound on the characters of a token, for BPE over all bytes whose components drop nothing; else ``None``."""
    shortening = [_shortening(part) for part in parts]
    if None in shortening or not _covers_all_bytes(backend, vocab, parts):
        return None
    return max(map(len, vocab)) * math.prod(factor for factor in shortening if factor)


def _covers_all_bytes(backend: tokenizers.Tokenizer, vocab: dict[str, int], parts: list[dict[str, Any]]) -> bool:
    """Whether every character has tokens, so that none is dropped or joined into an unknown one."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return all(char in vocab for char in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _shortening(part: dict[str, Any]) -> int | None:
    """The most characters that a component joins into one; ``None`` if it can drop any number."""
    kind = part["type"]
    if kind in ("NFC", "NFKC"):
        return _COMPOSED_CHARS
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return None if not pattern or not part["content"] else -(-len(pattern) // len(part["content"]))
    if kind in ("Split", "Punctuation"):
        return None if part["behavior"] == "Removed" else 1
    return 1 if kind in _KEEPS_LENGTH else None
