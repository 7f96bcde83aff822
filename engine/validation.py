"""Checks of a request's parameters: one bounds table, one id check, one length rule.

Also reads the defaults a model ships in generation_config.json. Nothing here needs torch or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from .errors import ModelError, RequestError
from .request import RequestOutputKind, SamplingParams, StructuredOutputs
from .sizes import parse_seconds

if TYPE_CHECKING:
    from .text.tokenizer import Tokenizer

MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 1024  # each is looked at while ``min_tokens`` holds
MAX_KEPT_IDS = 1024
MAX_TOKENIZER_IDS = 1 << 22  # of a tokenizer, which may know more than the model has rows
MAX_BIASES = 1024  # are copied to the device in every step
MAX_BAD_WORDS = 256
MAX_NGRAM = 64  # tokens that are compared at once
MAX_LOGPROBS = 20
MAX_CHOICES = 256
MAX_GRAMMAR_CHARS = 1 << 16  # of a schema, expression or grammar, compiled in the caller's thread
MAX_NAME_CHARS = 256  # of request ids, tenants and salts, which stand in logs and keys


class Bound(NamedTuple):
    """Closed interval of a number; ``above`` makes the lower end open. ``optional`` admits None."""

    kind: type
    low: float
    high: float
    above: bool = False
    optional: bool = False

    def __str__(self) -> str:
        bracket = "(" if self.above else "["
        return f"{'an integer' if self.kind is int else 'a number'} in {bracket}{self.low}, {self.high}]"


BOUNDS = {
    "n": Bound(int, 1, 64),
    "priority": Bound(int, -(2**31), 2**31 - 1),
    "temperature": Bound(float, 0, 100),
    "top_p": Bound(float, 0, 1, above=True),
    "top_k": Bound(int, -1, 2**31 - 1),
    "min_p": Bound(float, 0, 1),
    "repetition_penalty": Bound(float, 0.01, 100),
    "presence_penalty": Bound(float, -2, 2),
    "frequency_penalty": Bound(float, -2, 2),
    "seed": Bound(int, -(2**63), 2**63 - 1, optional=True),
    "max_tokens": Bound(int, 1, 2**31 - 1, optional=True),
    "min_tokens": Bound(int, 0, 2**31 - 1),
    "logprobs": Bound(int, 0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": Bound(int, 0, MAX_LOGPROBS, optional=True),
    "no_repeat_ngram_size": Bound(int, 0, MAX_NGRAM),
    "num_prefill_tokens": Bound(int, 1, 2**31 - 1, optional=True),
}
BIAS_BOUNDS = Bound(float, -100, 100)
FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "detokenize"),
    *("skip_special_tokens", "separate_reasoning", "kv_pinned"),
)
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def validate_params(params: object, *, vocab_size: int) -> SamplingParams:
    """Checks every field and returns the normal form, which shares nothing mutable with ``params``.

    Numbers, strings and lists are of exactly these types, ``stop`` is a list, ``top_k`` -1 is 0, ids occur once.
    ``vocab_size`` is the number of rows of the model's output, which bounds every token id.
    Raises RequestError naming field, value and remedy.
    """
    if not isinstance(params, SamplingParams):
        remedy = "Use SamplingParams(**options)" if isinstance(params, dict) else None
        raise RequestError("expected SamplingParams", field="params", value=params, remedy=remedy)
    fields: dict[str, Any] = {name: _number(name, getattr(params, name), bounds) for name, bounds in BOUNDS.items()}
    fields |= {name: check_flag(name, getattr(params, name)) for name in FLAGS}
    for name in ("tenant", "cache_salt", "session"):
        fields[name] = check_name(name, getattr(params, name))
    fields["retain"] = None if params.retain is None else _seconds("retain", params.retain)
    fields["kv_floor"] = None if params.kv_floor is None else check_name("kv_floor", params.kv_floor)
    fields["output_kind"] = _output_kind(params.output_kind)
    fields["top_k"] = max(fields["top_k"], 0)
    fields["stop"] = _strings("stop", _as_list(params.stop), MAX_STOP_STRINGS)
    words, bias = params.bad_words, params.logit_bias
    fields["bad_words"] = None if words is None else _strings("bad_words", words, MAX_BAD_WORDS)
    fields["logit_bias"] = None if bias is None else _bias(bias, vocab_size)
    structured = params.structured_outputs
    fields["structured_outputs"] = None if structured is None else _structured(structured)
    limits = {"stop_token_ids": (vocab_size, MAX_STOP_IDS), "allowed_token_ids": (vocab_size, vocab_size)}
    limits["kept_token_ids"] = (MAX_TOKENIZER_IDS, MAX_KEPT_IDS)
    for name, (size, limit) in limits.items():
        ids = getattr(params, name)
        fields[name] = None if ids is None else list(dict.fromkeys(check_ids(name, ids, size, limit)))
    fields["allowed_tokens"] = _function(params.allowed_tokens)
    wanted = params.prompt_logprob_ids
    fields["prompt_logprob_ids"] = None if wanted is None else _prompt_logprob_ids(wanted, vocab_size)
    checked = SamplingParams(**fields)
    _refuse_contradictions(checked)
    return checked


def check_flag(name: str, value: object) -> bool:
    """``value`` if it is a bool. Raises RequestError."""
    if value is not True and value is not False:
        raise RequestError("must be True or False", field=name, value=value)
    return value


def _seconds(name: str, value: object) -> float:
    if (seconds := parse_seconds(value)) is not None:
        return seconds
    raise RequestError("not a time", field=name, value=value, remedy='Give seconds, or "10min"; at most 30 days')


def _output_kind(value: object) -> RequestOutputKind:
    if isinstance(value, str) and value in list(RequestOutputKind):
        return RequestOutputKind(value)
    remedy = f"Choose from {', '.join(RequestOutputKind)}"
    raise RequestError("unknown", field="output_kind", value=value, remedy=remedy)


def _function(value: Any) -> Any:
    if value is not None and not callable(value):
        remedy = "Give a function of a list of ids, or allowed_token_ids"
        raise RequestError("is no function", field="allowed_tokens", value=value, remedy=remedy)
    return value


def check_name(name: str, value: object, *, may_be_empty: bool = True) -> str:
    """A short printable string as a plain ``str``. Raises RequestError."""
    remedy = f"Use a string of {0 if may_be_empty else 1} to {MAX_NAME_CHARS} printable characters"
    if not isinstance(value, str):
        raise RequestError("must be a string", field=name, value=value, remedy=remedy)
    plain = str.__str__(value)
    if not (plain or may_be_empty) or len(plain) > MAX_NAME_CHARS or not plain.isprintable():
        raise RequestError("not a name", field=name, value=plain, remedy=remedy)
    return plain


def _refuse_contradictions(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        remedy = f"Use at most max_tokens={params.max_tokens}"
        raise RequestError("is larger than max_tokens", field="min_tokens", value=params.min_tokens, remedy=remedy)
    if params.stop and not params.detokenize:
        raise RequestError(
            "stop strings are found in the text",
            field="detokenize",
            value=False,
            remedy="Set detokenize=True or use stop_token_ids",
        )
    if params.structured_outputs is not None and (params.ignore_eos or params.min_tokens):
        raise RequestError(
            "the form says where the output ends",
            field="structured_outputs",
            value=params.structured_outputs,
            remedy="Leave out ignore_eos and min_tokens",
        )
    if params.prompt_logprob_ids is not None and params.prompt_logprobs is None:
        remedy = "Set prompt_logprobs=0, or more"
        wanted = params.prompt_logprob_ids
        raise RequestError("needs prompt_logprobs", field="prompt_logprob_ids", value=wanted, remedy=remedy)
    if params.allowed_token_ids == []:
        raise RequestError(
            "allows no token at all",
            field="allowed_token_ids",
            value=[],
            remedy="Name some ids, or None for all",
        )


def _structured(value: object) -> StructuredOutputs:
    """``value`` with its schema as text. Raises RequestError."""
    field = "structured_outputs"
    if not isinstance(value, StructuredOutputs):
        raise RequestError("expected StructuredOutputs", field=field, value=value)
    found: dict[str, Any] = {name: getattr(value, name) for name in StructuredOutputs.__struct_fields__}
    given = [name for name, each in found.items() if each is not None and each is not False]
    if len(given) != 1:
        remedy = f"Give one of {', '.join(found)}"
        raise RequestError("names no form, or several", field=field, value=given, remedy=remedy)
    check_flag(f"{field}.json_object", value.json_object)
    if isinstance(value.json, dict):
        try:
            found["json"] = msgspec.json.encode(value.json).decode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"is not JSON data: {error}", field=f"{field}.json") from error
    if value.choice is not None:
        found["choice"] = _strings(f"{field}.choice", value.choice, MAX_CHOICES)
        if not value.choice:
            raise RequestError("allows no output", field=f"{field}.choice", value=[])
    for name in ("json", "regex", "grammar"):
        text = found[name]
        if text is not None and not (isinstance(text, str) and 1 <= len(text) <= MAX_GRAMMAR_CHARS):
            remedy = f"Use a string of 1 to {MAX_GRAMMAR_CHARS} characters"
            raise RequestError("not a grammar", field=f"{field}.{name}", value=text, remedy=remedy)
    return StructuredOutputs(**found)


def _number(name: str, value: object, bounds: Bound) -> float | int | None:
    if value is None and bounds.optional:
        return None
    remedy = f"Use {bounds}{' or None' if bounds.optional else ''}"
    number: float | int
    if isinstance(value, int) and not isinstance(value, bool):
        number = int.__int__(value)
    elif isinstance(value, float) and bounds.kind is float:
        number = float.__float__(value)
    else:
        raise RequestError("wrong type", field=name, value=value, remedy=remedy)
    # Written so that NaN, for which every comparison is false, is refused.
    if not (bounds.low < number if bounds.above else bounds.low <= number) or not number <= bounds.high:
        raise RequestError("out of range", field=name, value=value, remedy=remedy)
    return bounds.kind(number)  # type: ignore[no-any-return]


def _as_list(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _strings(name: str, value: object, limit: int) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise RequestError("must be a list of strings", field=name, value=value)
    if len(value) > limit:
        raise RequestError(f"has {len(value)} strings", field=name, value=value, remedy=f"Use at most {limit}")
    texts = [str.__str__(item) for item in value]
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            remedy = f"Use strings of 1 to {MAX_STOP_CHARS} characters"
            raise RequestError(f"a string has {len(text)} characters", field=name, value=text, remedy=remedy)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("a string holds half a character (a lone surrogate)", field=name, value=text)
    return texts


def check_ids(name: str, value: object, vocab_size: int, limit: int | None = None) -> list[int]:
    """``value`` as a list of at most ``limit`` ids, each an int in [0, vocab_size). Raises RequestError."""
    if not isinstance(value, list | tuple):
        raise RequestError("must be a list of token ids", field=name, value=value)
    if limit is not None and len(value) > limit:
        raise RequestError(f"has {len(value)} ids", field=name, value=value, remedy=f"Use at most {limit}")
    with suppress(Exception):  # odd items raise errors of their own; what is wrong is found below
        return msgspec.convert(value, list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]])  # one fast pass
    wrong = next((item for item in value if type(item) is not int or not 0 <= item < vocab_size), None)
    if type(wrong) is int:
        remedy = f"The model's ids are 0 to {vocab_size - 1}"
        raise RequestError("no such token", field=name, value=wrong, remedy=remedy)
    raise RequestError(
        f"must hold plain ints, not {type(wrong).__name__}",
        field=name,
        value=wrong,
        remedy="Convert with .tolist() or int()",
    )


def _prompt_logprob_ids(value: object, vocab_size: int) -> list[list[int]]:
    name = "prompt_logprob_ids"
    if not isinstance(value, list | tuple):
        raise RequestError("must be a list of lists of token ids", field=name, value=value)
    return [check_ids(name, ids, vocab_size, MAX_LOGPROBS) for ids in value]


def _bias(value: object, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError("must map token ids to numbers", field="logit_bias", value=value)
    biases = list(dict.items(value))
    ids = check_ids("logit_bias", [token_id for token_id, _ in biases], vocab_size, MAX_BIASES)
    numbers = [_number("logit_bias", bias, BIAS_BOUNDS) or 0.0 for _, bias in biases]
    return dict(zip(ids, numbers, strict=True))


def validate_prompt_ids(ids: object, vocab_size: int, limit: int) -> list[int]:
    """A prompt given as token ids, or made by the tokenizer: a list of 1 to ``limit`` ints in [0, vocab_size).

    ``vocab_size`` is the number of rows of the model's embedding; a tokenizer may know more ids.
    """
    if isinstance(ids, list | tuple) and len(ids) > limit:
        raise _too_long(len(ids), limit + 1)
    checked = check_ids("prompt_token_ids", ids, vocab_size)
    if not checked:
        raise RequestError("the prompt is empty", field="prompt_token_ids", value=[], remedy="Give at least one token")
    return checked


def validate_prefill(num_prompt_tokens: int, num_prefill_tokens: int | None) -> None:
    """Raises RequestError if ``num_prefill_tokens`` are more than the prompt has."""
    if num_prefill_tokens is not None and num_prefill_tokens > num_prompt_tokens:
        raise RequestError(
            "more than the prompt has",
            field="num_prefill_tokens",
            value=num_prefill_tokens,
            remedy=f"Use at most {num_prompt_tokens}, or None for all of them",
        )


def validate_prompt_logprob_ids(num_prompt_tokens: int, wanted: list[list[int]] | None) -> None:
    """Raises RequestError unless there is a list for each token of the prompt."""
    if wanted is not None and len(wanted) != num_prompt_tokens:
        raise RequestError(
            f"has a list for each of {len(wanted)} tokens, the prompt has {num_prompt_tokens}",
            field="prompt_logprob_ids",
            remedy=f"Give {num_prompt_tokens} lists, [] where no other token is wanted",
        )


def _too_long(num_prompt_tokens: int, max_model_len: int) -> RequestError:
    return RequestError(
        f"the prompt has {num_prompt_tokens} tokens and leaves no room in the context of {max_model_len}",
        field="max_model_len",
        value=max_model_len,
        remedy=f"Use a prompt of at most {max_model_len - 1} tokens or a larger max_model_len",
    )


def validate_lengths(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """The number of tokens the request may generate: ``max_tokens``, or the rest of the context if None.

    Lengths that do not fit are refused, never clipped.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise _too_long(num_prompt_tokens, max_model_len)
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise RequestError(
            f"{num_prompt_tokens} prompt tokens + {max_tokens} exceed the context of {max_model_len}",
            field="max_tokens",
            value=max_tokens,
            remedy=f"Use at most {room}, None for the rest of the context, or a larger max_model_len",
        )
    return max_tokens


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters a model recommends in generation_config.json; unknown keys are ignored.

    ``do_sample: false`` means greedy. Raises ModelError, naming the file, if a value is out of bounds.
    """
    values = _recommended(generation_config)
    try:
        checked = {name: _number(name, value, BOUNDS[name]) for name, value in values.items()}
    except RequestError as error:
        raise ModelError(f"generation_config.json: {error}") from error
    return SamplingParams(**checked)  # type: ignore[arg-type]


def describe_defaults(generation_config: Mapping[str, Any]) -> str:
    """The values ``default_params`` took, as ``name=value, ...`` for the log; empty if there are none."""
    return ", ".join(f"{name}={value}" for name, value in _recommended(generation_config).items())


def _recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        name: generation_config[key]
        for key, name in GENERATION_FIELDS.items()
        if generation_config.get(key) is not None
    }
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    return values


def eos_token_ids(
    generation_config: Mapping[str, Any], config_eos: Iterable[int], tokenizer: Tokenizer | None, *, vocab_size: int
) -> list[int]:
    """Ids that end a sequence: from generation_config.json, else config.json, and the tokenizer's own.

    Raises ModelError, naming the file, for anything that is no id below ``vocab_size``, the rows of the model's output.
    """
    declared = generation_config.get("eos_token_id")
    found: list[Any] = [*config_eos] if declared is None else declared if isinstance(declared, list) else [declared]
    remedy = f"The model's ids are 0 to {vocab_size - 1}"
    for token_id in found:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            field = "generation_config.json: eos_token_id"
            raise ModelError("must be a token id or a list of them", field=field, value=token_id, remedy=remedy)
    own = None if tokenizer is None else tokenizer.eos_token_id
    if own is not None and own >= vocab_size:
        raise ModelError("the model has no such token", field="tokenizer.json: eos_token", value=own, remedy=remedy)
    return list(dict.fromkeys(found if own is None else [*found, own]))
