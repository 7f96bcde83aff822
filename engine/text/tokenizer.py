"""Tokenizer of a model folder: text to ids, ids to text, chat messages to ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from ..errors import ModelError, RequestError
from ..model_files import has_file, parse_json, read_file, read_json_object, read_text
from .chat_messages import check_messages, check_template_kwargs
from .chat_template import ChatTemplate, select_template
from .rust_calls import contain
from .special_marks import SpecialMarks
from .text_stream import TextDecoder, TextStream
from .tokenizer_parts import check_tokenizer

TEMPLATE_DEFAULTS = {"tools": None, "documents": None, "add_generation_prompt": True}
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))  # all characters that str.split takes for spaces


class Tokenizer:
    """A ``tokenizers`` tokenizer with its model's special tokens and chat template. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], chat_template: str | None = None):
        """``config`` is tokenizer_config.json. Raises ModelError."""
        self._backend = backend
        self._limits = contain(ModelError, "tokenizer.json cannot be used", check_tokenizer, backend)
        self.vocab_size = self._limits.vocab_size
        self._special_tokens = _special_tokens(config)
        self.chat_template = chat_template
        self._template = self._tool_template = None if chat_template is None else ChatTemplate(chat_template)
        self.tool_template = chat_template  # of conversations with tools
        named = config.get("chat_template")
        if chat_template is not None and chat_template == select_template(named):
            for_tools = select_template(named, "tool_use")
            if for_tools is not None:
                self.tool_template, self._tool_template = for_tools, ChatTemplate(for_tools)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self._marks = SpecialMarks(token.content for token in special.values())
        self.info = _info(config, self._special_tokens, [token.content for token in special.values()], chat_template)
        backend.no_truncation()
        backend.no_padding()
        self._set_sequence_tokens(config)
        self._decoder = TextDecoder(backend, self.special_ids)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelError."""
        if not has_file(path, "tokenizer.json"):
            raise ModelError(f"{path} has no tokenizer.json", remedy=_missing_remedy(path))
        source = read_file(path, "tokenizer.json")
        parse_json(source, "tokenizer.json")  # our rules are stricter than the library's
        backend = contain(ModelError, "tokenizer.json is refused", tokenizers.Tokenizer.from_buffer, bytes(source))
        config = read_json_object(path, "tokenizer_config.json")
        if has_file(path, "chat_template.jinja"):
            template: str | None = read_text(path, "chat_template.jinja")
        else:
            template = select_template(config.get("chat_template"))
        return cls(backend, config, template)

    def close(self) -> None:
        """Ends the process that renders the chat template, if one runs. May be called again."""
        for template in (self._template, self._tool_template):
            if template is not None:
                template.close()

    # ---- text and ids

    def encode(self, text: str | bytes, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids; special tokens written out in ``text`` are recognized.

        A text that is too long for ``max_tokens`` whatever its tokens are is refused before it is tokenized.
        Raises RequestError.
        """
        return self._ids(self._backend, self._check_text(text, max_tokens), add_special_tokens)

    def token_of(self, text: str) -> int | None:
        """The one token that ``text`` is; None where it is several, or cannot be tokenized."""
        try:
            ids = self.encode(text, add_special_tokens=False)
        except RequestError:
            return None
        return ids[0] if len(ids) == 1 else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token give none. Raises RequestError."""
        message = "the ids cannot be decoded"
        return contain(RequestError, message, self._backend.decode, list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text: leading space kept, U+FFFD for part of a character. Raises RequestError."""
        stream = self._decoder.stream(False, prompt_ids=(token_id,))
        return stream.push(token_id) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token inside a text, or its share of a character's. Raises RequestError."""
        found = self._decoder.token_bytes(token_id)
        return self.token_text(token_id).encode() if found is None else found

    def text_stream(
        self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = (), kept_ids: Collection[int] = ()
    ) -> TextStream:
        """Incremental ``decode`` of the ids that follow ``prompt_ids``; special tokens among ``kept_ids`` stay."""
        return self._decoder.stream(skip_special_tokens, prompt_ids, kept_ids)

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell ``SamplingParams.bad_words``, with and without a space before."""
        forms = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
        found = [self.encode(form, add_special_tokens=False) for form in forms]
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]

    # ---- chat

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        max_tokens: int | None = None,
    ) -> tuple[str, list[int]]:
        """The conversation as the chat template writes it, and its ids, without a second BOS.

        A special token written out in a message stays ordinary text: a user cannot end a turn or speak as the system;
        only an assistant's messages are trusted, and ``template_kwargs``, the template's other variables.
        ``max_tokens`` is that of ``encode``. Raises RequestError, or ModelError without a usable template.
        """
        checked = check_messages(messages, self._marks.mark)
        given = check_template_kwargs(template_kwargs)
        template = self._template if given.get("tools") is None else self._tool_template
        if template is None:
            remedy = "Put a chat_template.jinja beside tokenizer.json"
            raise ModelError("the model has no chat template", remedy=remedy)
        variables = {**TEMPLATE_DEFAULTS, **self._special_tokens, **given, "messages": checked}
        text, spans = self._marks.unmark(template.render(variables))
        self._check_text(text, max_tokens)
        return text, self._spell_out(text, spans) if spans else self._ids(self._backend, text, False)

    def _spell_out(self, text: str, spans: list[tuple[int, int]]) -> list[int]:
        """The ids of ``text``, with each special token that touches one of ``spans`` spelled in ordinary tokens.

        Tokens and spans are both in order, so one pass finds which of them touch.
        """
        message, encode = "the text cannot be tokenized", self._backend.encode_batch
        encoding = contain(RequestError, message, encode, [text], add_special_tokens=False)[0]
        ids: list[int] = []
        spellings: dict[str, list[int]] = {}
        at = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            while at < len(spans) and spans[at][1] <= start:
                at += 1
            if token_id in self.special_ids and at < len(spans) and spans[at][0] < end:
                piece = text[start:end]
                if piece not in spellings:
                    spellings[piece] = self._spell(piece)
                ids += spellings[piece]
            else:
                ids.append(token_id)
        return ids

    def _spell(self, text: str) -> list[int]:
        ids = self._ids(self._plain_backend, text, False)
        if not self.special_ids.isdisjoint(ids):
            raise RequestError("a message holds a special token", field="messages", value=text, remedy="Remove it")
        return ids

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A second tokenizer, to which special tokens are ordinary text. Raises ModelError."""
        message = "tokenizer.json cannot be copied to spell special tokens"
        source = contain(ModelError, message, self._backend.to_str)
        plain = contain(ModelError, message, tokenizers.Tokenizer.from_str, source)
        plain.encode_special_tokens = True
        return plain

    def to_json(self) -> str:
        """The contents of tokenizer.json. Raises RequestError."""
        return contain(RequestError, "tokenizer.json cannot be copied", self._backend.to_str)

    # ---- inside

    def _ids(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of one text as a batch: the library lets other threads run only while it encodes a batch."""
        message, encode = "the text cannot be tokenized", backend.encode_batch_fast
        ids: list[int] = contain(RequestError, message, encode, [text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _check_text(self, text: str | bytes, max_tokens: int | None = None) -> str:
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise RequestError(f"the text is not UTF-8: {error}") from error
        if not isinstance(text, str):
            raise RequestError("must be a string", field="prompt", value=text)
        self._check_length(text, max_tokens)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds half a character (a lone surrogate): {error.reason}") from error
        return text

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        limits = self._limits
        if len(text) > limits.max_chars:
            raise RequestError(f"the text has {len(text)} characters", remedy=f"Use at most {limits.max_chars}")
        if max_tokens is None or limits.chars_per_token is None:
            return
        most = max_tokens * limits.chars_per_token
        if len(text) > most and (not limits.drops_spaces or len(text) - sum(map(text.count, SPACES)) > most):
            raise RequestError(
                f"the text has {len(text)} characters, which are more than {max_tokens} tokens",
                field="max_model_len",
                value=max_tokens,
                remedy=f"Use at most {most}",
            )

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _set_sequence_tokens(self, config: Mapping[str, Any]) -> None:
        """Honours ``add_bos_token`` and ``add_eos_token`` where tokenizer.json disagrees, like HF."""
        added = contain(ModelError, "the tokenizer fails", self._backend.encode, "").ids
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


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of tokenizer_config.json: each its text, or an object with ``content``."""
    found = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _info(
    config: Mapping[str, Any], named: Mapping[str, str], special: Sequence[str], chat_template: str | None
) -> dict[str, Any]:
    """What tokenizer_config.json tells, as transformers names it, for programs that tokenize elsewhere."""
    others = [text for text in special if text not in named.values()]
    found = {"tokenizer_class": config.get("tokenizer_class") or "PreTrainedTokenizerFast", **named}
    found |= {name: config[name] for name in ("add_bos_token", "add_eos_token") if name in config}
    found |= {"additional_special_tokens": others}
    return found if chat_template is None else {**found, "chat_template": chat_template}


def _missing_remedy(path: Path) -> str:
    if any(path.glob("*.model")):
        return "It has only a sentencepiece model; transformers' AutoTokenizer converts it and saves the file"
    return "Download the model again with its tokenizer files"
