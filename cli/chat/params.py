"""Sampling parameters as a user types them, on the command line or after ``/params``."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from qkv_engine.errors import ConfigError, RequestError
from qkv_engine.request import SamplingParams
from qkv_engine.validation import BOUNDS, validate_params

from ..common import nearest

if TYPE_CHECKING:
    from qkv_engine import Engine

_TYPES = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}

_WANTED = {
    bool: "true or false",
    str: "a word",
    str | None: "a word, or none",
    str | list[str] | None: "a text, a JSON list of texts, or none",
    list[str] | None: "a JSON list of texts, or none",
    list[int] | None: "a JSON list of token ids, or none",
    dict[int, float] | None: 'a JSON object of token ids and numbers such as {"3": 1.5}, or none',
}

# A chat shows one text, so how many there are, and whether they are text at all, is not for the user to set.
_FIXED = {
    *("n", "detokenize", "skip_special_tokens", "kept_token_ids", "separate_reasoning", "output_kind"),
    *("structured_outputs", "allowed_tokens"),
    *("logprobs", "prompt_logprobs", "prompt_logprob_ids", "num_prefill_tokens"),
}
SETTABLE = tuple(name for name in _TYPES if name not in _FIXED)

_OPTIONS = {
    "temperature": "0 always takes the likeliest token",
    "top_p": "only the likeliest tokens that together have this probability",
    "top_k": "only the N likeliest tokens; 0 is all",
    "min_p": "only tokens at least X times as likely as the likeliest",
    "seed": "for the same answers again",
    "max_tokens": "longest reply, thinking included",
}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The parameters that have an option of their own; the others are set with ``/params``."""
    group = parser.add_argument_group("sampling", "the model's own defaults apply where nothing is given")
    for name, meaning in _OPTIONS.items():
        number = float if name in ("temperature", "top_p", "min_p") else int
        metavar = "X" if number is float else "N"
        group.add_argument(f"--{name.replace('_', '-')}", type=number, metavar=metavar, help=meaning)


def sampling_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given on the command line. Raises ``ConfigError`` for one out of bounds."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    try:
        validate_params(SamplingParams(**given), vocab_size=1)
    except RequestError as error:
        raise ConfigError(error.message, field=error.field, value=error.value, remedy=error.remedy) from error
    return given


def chat_params(engine: Engine, overrides: dict[str, Any]) -> SamplingParams:
    """The model's defaults with ``overrides``."""
    return msgspec.structs.replace(engine.default_params, **overrides)


def set_param(params: SamplingParams, name: str, text: str, engine: Engine) -> SamplingParams:
    """``params`` with ``name`` as ``text`` says, where "default" is the model's. Raises ``RequestError``."""
    if name not in SETTABLE:
        hint = nearest(name, SETTABLE, "/params lists those that can be set")
        reason = "cannot be set in a chat" if name in _FIXED else "is not a sampling parameter"
        raise RequestError(f"{name} {reason}", remedy=hint)
    value = getattr(engine.default_params, name) if text == "default" else _parse(name, text)
    return validate_params(msgspec.structs.replace(params, **{name: value}), vocab_size=engine.vocab_size)


def _parse(name: str, text: str) -> Any:
    """``text`` as JSON if it is, as a word if not."""
    if text.lower() == "none":
        text = "null"
    candidates: list[Any] = [text]
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        candidates.insert(0, msgspec.json.decode(text))
    for candidate in candidates:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(candidate, _TYPES[name], strict=False)
    wanted = str(BOUNDS[name]) if name in BOUNDS else _WANTED.get(_TYPES[name], "JSON")
    raise RequestError(f"{name} takes {wanted}, not {text!r}", remedy='"default" is the model\'s own')
