"""Structured outputs: the tokens that may come next under a grammar, by llguidance. One guide a completion."""

from __future__ import annotations

import ctypes
import json
from array import array
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RequestError
from ..request import StructuredOutputs
from ..text.reasoning import ReasoningMarks
from ..text.rust_calls import contain

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

FIELD = "structured_outputs"
_SPACE = {"whitespace_pattern": "[ \\n]{0,20}"}  # between parts of JSON; without a bound a model may write on for ever
# For each byte its eight bits, the lowest first, as the eight bytes of an integer.
_BITS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64)[:, 0]
_ANY_OBJECT = '{"type": "object"}'
_UNREADABLE = "the grammar cannot be compiled"


class Grammars:
    """Compiles grammars over one model's tokens. The first takes as long as reading the tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]):
        """``vocab_size`` is the number of rows of the model's output."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)

    def compile(self, wanted: StructuredOutputs) -> Guide:
        """The guide of an output that begins. Raises ``RequestError`` for a grammar with a mistake."""
        matcher = self._library.LLMatcher
        grammar = contain(_mistake, _UNREADABLE, _source, matcher, wanted)
        if mistake := contain(_mistake, _UNREADABLE, matcher.validate_grammar, grammar, self._table):
            raise _mistake(f"{_UNREADABLE}: {' '.join(mistake.split())[:500]}")
        return Guide(matcher(self._table, grammar, log_level=0), self._vocab_size, self._eos_ids)

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            remedy = "Run: pip install 'qkv-engine[structured]'"
            raise RequestError("llguidance is not installed", field=FIELD, remedy=remedy) from error
        return llguidance

    @cached_property
    def _table(self) -> Any:
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        make = self._library.LLTokenizer
        message = "llguidance cannot read tokenizer.json"
        return contain(_mistake, message, make, self._tokenizer.to_json(), n_vocab=size, eos_token=self._eos_ids)


class Guide:
    """The state of a grammar after the tokens of a completion. Reasoning comes before the grammar's text."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: Sequence[int], marks: ReasoningMarks | None = None):
        self._matcher, self._vocab_size, self._eos_ids, self._marks = matcher, vocab_size, eos_ids, marks
        self._is_reasoning = marks is not None and marks.is_open
        self._num_read = 0  # output tokens

    def begin(self, marks: ReasoningMarks | None) -> Guide:
        """A guide like this one for a completion from its first token; ``marks`` are those around its reasoning."""
        return Guide(self._matcher.deep_copy(), self._vocab_size, self._eos_ids, marks)

    def allowed(self, token_ids: Sequence[int], num_prompt_tokens: int) -> torch.Tensor | None:
        """The tokens that may follow those of prompt and output, [V] bool; None for all.

        ``token_ids`` has the tokens of the call before, and perhaps more. Raises ``RequestError`` where the grammar
        takes more than llguidance's limits.
        """
        for position in range(num_prompt_tokens + self._num_read, len(token_ids)):
            self._read(token_ids[position])
        return None if self._is_reasoning else self._mask()

    def _read(self, token_id: int) -> None:
        marks, is_first = self._marks, self._num_read == 0
        self._num_read += 1
        if marks is not None and self._is_reasoning:
            self._is_reasoning = token_id != marks.closing
        elif marks is not None and is_first and token_id == marks.opening:
            self._is_reasoning = True
        elif not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def _mask(self) -> torch.Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        if self._matcher.is_error():
            raise _mistake(f"the grammar stopped: {self._matcher.get_error()[:200]}")
        if self._matcher.is_stopped():
            mask[self._eos_ids] = True
            return mask
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = _BITS.index_select(0, packed.int()).view(torch.bool)[: self._vocab_size]
        mask[: len(bits)] = bits
        if self._num_read == 0 and self._marks is not None:
            mask[self._marks.opening] = True
        return mask


def indices(mask: torch.Tensor) -> array[int]:
    """The places where ``mask`` is true."""
    return as_array("i", mask.nonzero()[:, 0].int())


def as_array(code: str, tensor: torch.Tensor) -> array[Any]:
    """A contiguous tensor on the CPU as an array of type ``code``, whose items are as large."""
    return array(code, ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def _mistake(text: str) -> RequestError:
    return RequestError(text, field=FIELD)


def _source(matcher: Any, wanted: StructuredOutputs) -> str:
    """The grammar of ``wanted`` in llguidance's form."""
    if wanted.json is not None:
        return str(matcher.grammar_from_json_schema(wanted.json, overrides=_SPACE))
    if wanted.json_object:
        return str(matcher.grammar_from_json_schema(_ANY_OBJECT, overrides=_SPACE))
    if wanted.regex is not None:
        return str(matcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in wanted.choice)))
    return str(matcher.grammar_from_lark(wanted.grammar))
