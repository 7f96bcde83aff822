"""Checks of requests in their callers' threads: nothing unchecked reaches the engine's own thread."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

from .errors import CapacityError, QKVError, RequestError
from .request import RequestOutputKind, SamplingParams
from .sampling.allowed_tokens import AllowedTokens
from .sampling.guide import Grammars, Guide
from .sampling.ngrams import Ngrams
from .serving.submission import Submission
from .started import Started
from .text.find_marks import find_marks
from .text.reasoning import Marks
from .text.tokenizer import Tokenizer
from .validation import (
    check_name,
    validate_lengths,
    validate_params,
    validate_prefill,
    validate_prompt_ids,
    validate_prompt_logprob_ids,
)

Message = Mapping[str, Any]  # ``role`` and ``content``
Conversation = Sequence[Message]
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}

_PROMPT_REMEDY = "Give a string or a list of token ids"
_SEVERAL_REMEDY = "Give one, or all of them to generate() or chat()"
_CHAT_REMEDY = 'Use a list such as [{"role": "user", "content": "Hello"}]'


class Intake:
    """Turns callers' arguments into submissions. Thread-safe. Every error is a ``RequestError``."""

    def __init__(self, started: Started):
        self._tokenizer = started.tokenizer
        self._vocab_size, self._max_model_len = started.config.vocab_size, started.max_model_len
        self._default_params = started.default_params
        self._rungs = started.ladder.names
        self.capacities = started.core.space.capacities  # by floor
        self._eos_ids, self._grammars = started.core.eos_ids, cast(Grammars | None, None)
        self._marks = None if self._tokenizer is None else find_marks(self._tokenizer)
        self._names, self._serials = f"request-{secrets.token_hex(4)}", count()  # no caller's id is like it by chance

    def params(self, changes: Mapping[str, Any]) -> SamplingParams:
        """The model's default parameters with ``changes``, checked."""
        defaults = {name: getattr(self._default_params, name) for name in SamplingParams.__struct_fields__}
        unknown = changes.keys() - defaults.keys()
        with _typed_errors():
            if unknown:
                remedy = f"Choose from {', '.join(defaults)}"
                raise RequestError("unknown parameter", field=min(unknown), value=changes[min(unknown)], remedy=remedy)
            return validate_params(SamplingParams(**{**defaults, **changes}), vocab_size=self._vocab_size)

    def completions(self, prompts: object, params: object, request_id: object) -> list[Submission]:
        """One submission a prompt; one prompt alone, also one given as token ids, counts as a list of one."""
        with _typed_errors():
            return self._each(_as_prompts(prompts), params, request_id, None)

    def conversations(
        self, messages: object, params: object, request_id: object, template_kwargs: object
    ) -> tuple[list[Submission], bool]:
        """One submission a conversation, and whether ``messages`` are several conversations."""
        with _typed_errors():
            if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
                many = [_as_conversation(each) for each in messages]
                return self._each(many, params, request_id, template_kwargs), True
            return self._each([_as_conversation(messages)], params, request_id, template_kwargs), False

    def streamed(self, prompt: object, params: object, request_id: object, template_kwargs: object) -> Submission:
        """The submission of a prompt or a conversation whose outputs are read as they come, or the last one alone."""
        with _typed_errors():
            return self._prepare(prompt, params, request_id, template_kwargs, is_streamed=True)

    def _each(self, prompts: list[object], params: object, names: object, kwargs: object) -> list[Submission]:
        each, ids = (_one_each("params", params, prompts, SamplingParams), _one_each("request_id", names, prompts, str))
        return [
            self._prepare(prompt, given, name, kwargs, is_streamed=False)
            for prompt, given, name in zip(prompts, each, ids, strict=True)
        ]

    def _prepare(
        self, prompt: object, params: object, request_id: object, template_kwargs: object, *, is_streamed: bool
    ) -> Submission:
        """Checks and tokenizes one prompt or conversation."""
        given = self._default_params if params is None else params
        checked = validate_params(given, vocab_size=self._vocab_size)
        name = self._new_name() if request_id is None else check_name("request_id", request_id, may_be_empty=False)
        text, ids, marks = self._tokenize(prompt, template_kwargs)
        ids = validate_prompt_ids(ids, self._vocab_size, self._max_model_len - 1)
        validate_prefill(len(ids), checked.num_prefill_tokens)
        validate_prompt_logprob_ids(len(ids), checked.prompt_logprob_ids)
        floor = self._floor(checked)
        return Submission(
            name,
            text,
            ids,
            checked,
            self._max_tokens(len(ids), checked, floor),
            secrets.randbits(63) if checked.seed is None else checked.seed,
            self._bad_word_ids(checked),
            is_streamed and checked.output_kind is not RequestOutputKind.FINAL_ONLY,
            marks.after(ids) if marks is not None and checked.separate_reasoning else None,
            self._guide(checked),
            self._chooser(checked),
            _prompt_ngrams(ids, checked.no_repeat_ngram_size),
            floor=floor,
        )

    def close(self) -> None:
        """Ends the process that compiles grammars, if one runs."""
        if self._grammars is not None:
            self._grammars.close()

    def _new_name(self) -> str:
        return f"{self._names}-{next(self._serials)}"

    def _floor(self, params: SamplingParams) -> int:
        """The narrowest rung that a request with ``params`` allows."""
        if params.kv_pinned:
            return 0
        if params.kv_floor is None:
            return len(self._rungs) - 1
        if params.kv_floor not in self._rungs:
            remedy = f"Choose from {', '.join(self._rungs)}"
            raise RequestError("no rung of this ladder", field="kv_floor", value=params.kv_floor, remedy=remedy)
        return self._rungs.index(params.kv_floor)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, floor: int) -> int:
        """Output tokens of a request, which must fit in its context and alone in KV memory."""
        max_tokens = validate_lengths(num_prompt_tokens, params.max_tokens, self._max_model_len)
        capacity = self.capacities[floor]
        if params.max_tokens is None:
            max_tokens = max(1, min(max_tokens, capacity + 1 - num_prompt_tokens))
        num_tokens = num_prompt_tokens + max_tokens - 1
        if num_tokens > capacity:
            raise CapacityError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} new ones need {num_tokens} tokens of KV "
                f"memory, which holds {capacity} at this request's kv_floor",
                remedy="Raise kv_memory, lower max_tokens, or allow a narrower kv_floor",
            )
        return max_tokens

    def _tokenize(self, prompt: object, kwargs: object) -> tuple[str | None, Sequence[Any], Marks | None]:
        """Text of a prompt, if it has one, its token ids, not checked yet, and the marks of a conversation."""
        if _is_conversation(prompt):
            tokenizer, variables = self._need_tokenizer("messages", prompt), {} if kwargs is None else kwargs
            text, ids = tokenizer.chat_prompt(
                cast(Conversation, prompt), cast(Mapping[str, Any], variables), max_tokens=self._max_model_len
            )
            return text, ids, self._marks
        if kwargs:
            raise RequestError("is for conversations", field="template_kwargs", value=kwargs)
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
            raise RequestError("several prompts", field="prompt", value=prompt, remedy=_SEVERAL_REMEDY)
        found = _prompt_of(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(found, list | tuple):
            return None, found, None
        if not isinstance(found, str):
            raise RequestError("not a prompt", field="prompt", value=found, remedy=_PROMPT_REMEDY)
        encode = self._need_tokenizer("prompt", found).encode
        return found, encode(found, max_tokens=self._max_model_len), None

    def _need_tokenizer(self, field: str, value: object) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer", field=field, value=value, remedy="Give a list of token ids"
            )
        return self._tokenizer

    def _guide(self, params: SamplingParams) -> Guide | None:
        wanted = params.structured_outputs
        if wanted is None:
            return None
        tokenizer = self._need_tokenizer("structured_outputs", wanted)
        if self._grammars is None:  # two threads may make two; either will do
            self._grammars = Grammars(tokenizer, self._vocab_size, self._eos_ids)
        return self._grammars.compile(wanted, params.tenant)

    def _chooser(self, params: SamplingParams) -> AllowedTokens | None:
        return None if params.allowed_tokens is None else AllowedTokens(params.allowed_tokens, self._vocab_size)

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of ``bad_words``; one with a token beyond the model's rows never comes up."""
        if not params.bad_words:
            return []
        found = self._need_tokenizer("bad_words", params.bad_words).bad_word_ids(params.bad_words)
        return [ids for ids in found if max(ids) < self._vocab_size]


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turns an error from a method of an object that was passed into a ``RequestError``."""
    try:
        yield
    except QKVError:
        raise
    except Exception as error:
        raise RequestError("the request cannot be read", field="error", value=error) from error


def _prompt_ngrams(ids: list[int], size: int) -> Ngrams | None:
    """The runs of a prompt, taken in on the caller's thread: those of a long one hold no other request up."""
    if not size:
        return None
    found = Ngrams(size)
    found.read(ids)
    return found


def takes_long(prompt: object, params: object) -> bool:
    """Whether a text is still to be tokenized, a conversation to be rendered, or a rule to be prepared."""
    has_rule = isinstance(params, SamplingParams) and bool(params.structured_outputs or params.no_repeat_ngram_size)
    return has_rule or isinstance(prompt, str | Mapping) or _is_conversation(prompt)


def _is_conversation(prompt: object) -> bool:
    """Whether ``prompt`` is a list of messages, well-formed or not."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _as_conversation(messages: object) -> object:
    """The conversation in ``messages``; a string is one user message. Raises RequestError for anything else."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        raise RequestError("a message alone", field="messages", value=messages, remedy=_CHAT_REMEDY)
    if not _is_conversation(messages):
        raise RequestError("not a conversation", field="messages", value=messages, remedy=_CHAT_REMEDY)
    return messages


def _as_prompts(prompts: object) -> list[object]:
    """``prompts`` of ``Engine.generate`` as a list: one prompt, also one given as token ids, is a list of one."""
    if not isinstance(prompts, list | tuple):
        return [prompts]
    for prompt in prompts:
        if isinstance(prompt, Mapping) and "role" in prompt:
            raise RequestError("messages are no prompts", field="prompts", value=prompts, remedy="Use chat()")
        if not isinstance(prompt, str | Mapping | list | tuple):
            return [prompts]
    return list(prompts)


def _one_each(field: str, given: object, prompts: list[object], kind: type) -> list[Any]:
    """``given`` for each of ``prompts``: one for all (``kind`` or None), or a list with one each."""
    if given is None or isinstance(given, kind):
        return [given] * len(prompts)
    if not isinstance(given, list | tuple):
        remedy = (
            f"Give {kind.__name__}{'(**options)' if isinstance(given, Mapping) else ''}, or a list with one a prompt"
        )
        raise RequestError(f"expected {kind.__name__}", field=field, value=given, remedy=remedy)
    if len(given) != len(prompts):
        raise RequestError(f"{len(given)} for {len(prompts)} prompts", field=field, value=given)
    return list(given)


def _prompt_of(prompt: Mapping[Any, Any]) -> object:
    """The text or token ids of a prompt given as a dict."""
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        remedy = 'Use {"prompt": text} or {"prompt_token_ids": ids}'
        raise RequestError("not a prompt", field="prompt", value=prompt, remedy=remedy)
    return next(iter(prompt.values()))
