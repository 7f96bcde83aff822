"""Tokenizer of a model folder: text to ids, ids to text, chat messages to ids."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers.processors import TemplateProcessing

from qkv_engine.models.files import has_file, parse_json, read_file, read_json_object, read_text

from .chat_template import ChatTemplate, check_messages, select_template
from .errors import ModelError, QKVError, RequestError
from .text_stream import TextDecoder, TextStream

MAX_TEXT_CHARS = 1 << 24
MAX_EXPANSION = 4096  # times a normalizer's replacements may lengthen a text
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Noncharacters, which no text may hold, around the number of a special token that a user wrote out.
MARK_BEGIN, MARK_END = "\ufdd0", "\ufdd1"
MARKED = re.compile(f"{MARK_BEGIN}([0-9]+){MARK_END}")

T = TypeVar("T")


class Tokenizer:
    """A ``tokenizers`` tokenizer with its model's special tokens and chat template. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], chat_template: str | None = None):
        """``config`` is tokenizer_config.json. Raises ModelError."""
        self._backend = backend
        self._special_tokens = _special_tokens(config)
        self.chat_template = chat_template
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        backend.no_truncation()
        backend.no_padding()
        _check_expansion(backend)
        self._set_sequence_tokens(config)
        self._decoder = TextDecoder(backend, self.special_ids)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelError."""
        if not has_file(path, "tokenizer.json"):
            raise ModelError(f"{path} has no tokenizer.json", remedy=_missing_remedy(path))
        source = read_file(path, "tokenizer.json")
        parse_json(source, "tokenizer.json")  # our rules are stricter than the library's
        backend = _contain(ModelError, "tokenizer.json is refused", tokenizers.Tokenizer.from_buffer, bytes(source))
        config = read_json_object(path, "tokenizer_config.json")
        if has_file(path, "chat_template.jinja"):
            template: str | None = read_text(path, "chat_template.jinja")
        else:
            template = select_template(config.get("chat_template"))
        return cls(backend, config, template)

    # ---- text and ids

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in ``text`` are recognized. Raises RequestError."""
        return self._encode(self._backend, _check_text(text), add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str | bytes], add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` of each text, in parallel. Raises RequestError."""
        checked = [_check_text(text) for text in texts]
        encode = self._backend.encode_batch_fast
        found = _contain(
            RequestError,
            "the texts cannot be tokenized",
            encode,
            checked,
            add_special_tokens=add_special_tokens,
        )
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token give none. Raises RequestError."""
        message = "the ids cannot be decoded"
        return _contain(RequestError, message, self._backend.decode, list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text: leading space kept, U+FFFD for part of a character."""
        stream = self._decoder.stream(False, prompt_ids=(token_id,))
        return stream.push(token_id) + stream.finish()

    def text_stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Incremental ``decode`` of the ids that follow ``prompt_ids``."""
        return self._decoder.stream(skip_special_tokens, prompt_ids)

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell ``SamplingParams.bad_words``, with and without a space before."""
        forms = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
        found = [self.encode(form, add_special_tokens=False) for form in forms]
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]

    # ---- chat

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as prompt text. Raises RequestError, or ModelError without a usable template."""
        variables = {**self._special_tokens, **template_kwargs}
        return self._compiled_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """The conversation as ids: ``apply_chat_template``, encoded without a second BOS.

        A special token written out in a message stays ordinary text: a user cannot end a turn or speak
        as the system; only an assistant's messages are trusted. Raises RequestError, or ModelError as above.
        """
        marked = [m if m["role"] == "assistant" else self._mark(m) for m in check_messages(messages)]
        text = self.apply_chat_template(marked, add_generation_prompt=add_generation_prompt, **template_kwargs)
        if MARK_BEGIN not in text:
            return self.encode(text, add_special_tokens=False)
        return self._encode_marked(text)

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ModelError(
                "the model has no chat template",
                remedy="Put a chat_template.jinja beside tokenizer.json",
            )
        return ChatTemplate(self.chat_template)

    @cached_property
    def _special_texts(self) -> list[str]:
        """Longest first, so that a token is found before one that it contains."""
        added = self._backend.get_added_tokens_decoder()
        return sorted((added[i].content for i in self.special_ids), key=len, reverse=True)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_texts)) or "(?!)")

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A second tokenizer, to which special tokens are ordinary text."""
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _mark(self, value: Any) -> Any:
        """``value`` with the special tokens in its strings replaced by marks."""
        if isinstance(value, str):
            clean = value.replace(MARK_BEGIN, "\ufffd").replace(MARK_END, "\ufffd")
            index = self._special_texts.index
            return self._special_pattern.sub(lambda m: f"{MARK_BEGIN}{index(m[0])}{MARK_END}", clean)
        if isinstance(value, Mapping):
            return {key: self._mark(item) for key, item in value.items()}
        return [self._mark(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_marked(self, text: str) -> list[int]:
        """Encode the text as a whole, then spell out each special token that came from a mark."""
        pieces = MARKED.split(text)  # text, number, text, number, ..., text
        spans, whole = [], pieces[0]
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            special = self._special_texts[int(number)]
            spans.append((len(whole), len(whole) + len(special)))
            whole += special + piece
        encoding = self._encode(self._backend, _check_text(whole), False)
        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.special_ids and any(start < b and a < end for a, b in spans):
                ids += self._spell(whole[start:end])
            else:
                ids.append(token_id)
        return ids

    def _spell(self, text: str) -> list[int]:
        ids: list[int] = self._encode(self._plain_backend, text, False).ids
        if not self.special_ids.isdisjoint(ids):
            raise RequestError("a message holds a special token", field="messages", value=text, remedy="Remove it")
        return ids

    # ---- inside

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        message = "the text cannot be tokenized"
        return _contain(RequestError, message, backend.encode, text, add_special_tokens=add_special_tokens)

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _set_sequence_tokens(self, config: Mapping[str, Any]) -> None:
        """Honour ``add_bos_token`` and ``add_eos_token`` where tokenizer.json disagrees, like HF."""
        added = _contain(ModelError, "the tokenizer fails", self._backend.encode, "").ids
        has_bos, has_eos = self.bos_token_id in added[:1], self.eos_token_id in added[-1:]
        wants_bos, wants_eos = config.get("add_bos_token", has_bos), config.get("add_eos_token", has_eos)
        if (bool(wants_bos), bool(wants_eos)) == (has_bos, has_eos):
            return
        bos = self._special_tokens.get("bos_token") if wants_bos else None
        eos = self._special_tokens.get("eos_token") if wants_eos else None
        ids = {text: self._backend.token_to_id(text) for text in (bos, eos) if text}
        if None in ids.values():
            raise ModelError(f"tokenizer.json lacks a token that tokenizer_config.json names: {list(ids)}")
        template = [part for part in (bos, "$A", eos) if part]
        processor = TemplateProcessing(single=template, special_tokens=list(ids.items()))
        self._backend.post_processor = processor


def _contain(error_type: type[QKVError], message: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call into the Rust library, whose panics derive from BaseException and must not end a thread."""
    try:
        return call(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise error_type(f"{message}: {error}") from error


def _check_text(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"the text is not UTF-8: {error}") from error
    if not isinstance(text, str):
        raise RequestError("must be a string", field="prompt", value=text)
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(f"the text has {len(text)} characters", remedy=f"Use at most {MAX_TEXT_CHARS}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the text holds half a character (a lone surrogate): {error.reason}") from error
    return text


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of tokenizer_config.json: each its text, or an object with ``content``."""
    found = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _missing_remedy(path: Path) -> str:
    if any(path.glob("*.model")):
        return "It has only a sentencepiece model; transformers' AutoTokenizer converts it and saves the file"
    return "Download the model again with its tokenizer files"


def _check_expansion(backend: tokenizers.Tokenizer) -> None:
    """Refuse chained replacements that blow a short text up until memory ends: that aborts the process."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        state = json.loads(part.__getstate__()) if part is not None else {}
        if _expansion(state) > MAX_EXPANSION:
            raise ModelError("tokenizer.json: its replacements lengthen a text without bound")


def _expansion(state: dict[str, Any]) -> int:
    """How many times longer a chain of components can make a text, at most."""
    if state.get("type") == "Sequence":
        parts = state.get("normalizers") or state.get("pretokenizers") or []
        return math.prod(_expansion(part) for part in parts)
    return 1 + len(state["content"]) if state.get("type") == "Replace" else 1
