"""Structured outputs: the tokens that may come next under a grammar, by llguidance. One guide a completion."""

from __future__ import annotations

import ctypes
import json
import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import RequestError, remedy_of_extra
from ..request import StructuredOutputs
from ..sandbox import Job, ProcessEndedError, Refusal, Sandbox, Sandboxes
from ..sandbox.process import folders_of
from ..text.reasoning import Marks
from ..text.rust_calls import contain
from .grammar_worker import check_matcher, make_matcher, make_table

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

FIELD = "structured_outputs"
# Between parts of JSON, such as indented text has; without a bound a model may write on for ever.
_SPACE = {"whitespace_pattern": " ?\\n{0,2} {0,16}"}
# For each byte its eight bits, the lowest first, as the eight bytes of an integer.
_BITS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64)[:, 0]
_ANY_OBJECT = '{"type": "object"}'
UNREADABLE, STOPPED = "the grammar cannot be compiled", "the grammar stopped"
MAX_REMEMBERED = 4096  # grammars
REFUSED_SECONDS = 60.0  # for which a refusal is remembered: on a busy machine an honest grammar may have been slow
JOB = Job(
    work="compiles grammars",
    source=Path(__file__).with_name("grammar_worker.py"),
    folders=folders_of("llguidance"),
    seconds=1.0,
    start_seconds=60,  # to read the largest tokenizer.json on a busy machine
    memory=1 << 28,
)


class _Trial(NamedTuple):
    """What became of a grammar in the sandbox. ``refusal`` is "" where it passed; ``end`` is when to try it again."""

    refusal: str
    end: float


class Grammars:
    """Compiles grammars over one model's tokens. The first takes as long as reading the tokenizer. Thread-safe.

    A grammar is compiled in a sandbox first, and here only if that went well; tenants take turns. Both are remembered.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]):
        """``vocab_size`` is the number of rows of the model's output."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._sandboxes = Sandboxes(JOB, lambda: json.dumps(self._tokens).encode())
        self._trials: OrderedDict[bytes, _Trial] = OrderedDict()  # by a grammar's digest, the oldest first

    def compile(self, wanted: StructuredOutputs, tenant: str) -> Guide:
        """The guide of an output that begins. Raises ``RequestError`` for a grammar with a mistake, or too large a one.

        Raises ``UnavailableError`` if the system has no process for it.
        """
        grammar = contain(_mistake, UNREADABLE, _source, self._library.LLMatcher, wanted)
        if refusal := self._refusal(grammar, tenant):
            raise _mistake(refusal)
        matcher = contain(_mistake, UNREADABLE, make_matcher, self._library, self._table, grammar)
        return Guide(matcher, self._vocab_size, self._eos_ids)

    def close(self) -> None:
        """Ends the sandboxes' processes, if they run. May be called again."""
        self._sandboxes.close()

    def _refusal(self, grammar: str, tenant: str) -> str:
        """Why a grammar is refused, "" where it is not: as remembered, or found out when it is the tenant's turn."""
        digest = sha256(grammar.encode()).digest()
        if (known := self._recall(digest)) is not None:
            return known
        with self._sandboxes.turn(tenant) as sandbox:
            if (known := self._recall(digest)) is not None:  # found out meanwhile
                return known
            refusal = _try(sandbox, grammar)
            self._trials[digest] = _Trial(refusal, time.monotonic() + REFUSED_SECONDS if refusal else math.inf)
        if len(self._trials) > MAX_REMEMBERED:
            self._trials.popitem(last=False)
        return refusal

    def _recall(self, digest: bytes) -> str | None:
        trial = self._trials.get(digest)
        return trial.refusal if trial is not None and time.monotonic() < trial.end else None

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "llguidance is not installed", field=FIELD, remedy=remedy_of_extra("structured")
            ) from error
        return llguidance

    @property
    def _tokens(self) -> tuple[str, int, list[int]]:
        """The arguments of ``make_table``."""
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        return self._tokenizer.to_json(), size, self._eos_ids

    @cached_property
    def _table(self) -> Any:
        return contain(_mistake, "llguidance cannot read tokenizer.json", make_table, self._library, *self._tokens)


class Guide:
    """The state of a grammar after the tokens of a completion. Reasoning comes before the grammar's text."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: Sequence[int], marks: Marks | None = None):
        self._matcher, self._vocab_size, self._eos_ids = matcher, vocab_size, eos_ids
        self._gate = None if marks is None else marks.gate(self._allows)
        self._num_read = 0  # output tokens

    def begin(self, marks: Marks | None) -> Guide:
        """A guide like this one for a completion from its first token; ``marks`` are those around its reasoning."""
        return Guide(self._matcher.deep_copy(), self._vocab_size, self._eos_ids, marks)

    def allowed(self, token_ids: Sequence[int], num_prompt_tokens: int) -> torch.Tensor | None:
        """The tokens that may follow those of prompt and output, [V] bool; None for all.

        ``token_ids`` has the tokens of the call before, and perhaps more. Raises ``RequestError`` where the grammar
        takes more than llguidance's limits.
        """
        for position in range(num_prompt_tokens + self._num_read, len(token_ids)):
            self._read(token_ids[position])
        gate = self._gate
        if gate is None:
            return self._mask(self._matcher)
        if gate.is_free:
            return None
        mask = torch.zeros(self._vocab_size, dtype=torch.bool) if gate.forced else self._mask(self._after(gate.pending))
        mask[[*gate.forced, *gate.extra]] = True
        return mask

    def _read(self, token_id: int) -> None:
        self._num_read += 1
        for each in (token_id,) if self._gate is None else self._gate.feed(token_id):
            _consume(self._matcher, each)

    def _after(self, token_ids: Sequence[int]) -> Any:
        """The matcher behind ``token_ids`` more, which may yet turn out to be none of the grammar's."""
        matcher = self._matcher.deep_copy() if token_ids else self._matcher
        for token_id in token_ids:
            _consume(matcher, token_id)
        return matcher

    def _allows(self, token_id: int) -> bool:
        """Whether the grammar's text may begin with a token."""
        found: int = contain(_mistake, STOPPED, self._matcher.validate_tokens, [token_id])
        return found == 1

    def _mask(self, matcher: Any) -> torch.Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        contain(_mistake, STOPPED, check_matcher, matcher)
        if matcher.is_stopped():
            mask[self._eos_ids] = True
            return mask
        packed = torch.frombuffer(bytearray(_compute_mask(matcher)), dtype=torch.uint8)
        bits = _BITS.index_select(0, packed.int()).view(torch.bool)[: self._vocab_size]
        mask[: len(bits)] = bits
        return mask


def _consume(matcher: Any, token_id: int) -> None:
    if not matcher.is_stopped():
        contain(_mistake, STOPPED, matcher.consume_token, token_id)


def _compute_mask(matcher: Any) -> bytes:
    found: bytes = contain(_mistake, STOPPED, matcher.compute_bitmask)
    contain(_mistake, STOPPED, check_matcher, matcher)
    return found


def indices(mask: torch.Tensor) -> array[int]:
    """The places where ``mask`` is true."""
    return as_array("i", mask.nonzero()[:, 0].int())


def as_array(code: str, tensor: torch.Tensor) -> array[Any]:
    """A contiguous tensor on the CPU as an array of type ``code``, whose items are as large."""
    return array(code, ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def _try(sandbox: Sandbox, grammar: str) -> str:
    """Why a process does not survive a grammar, or llguidance refuses it; "" if all is well."""
    try:
        sandbox.ask(grammar.encode())
    except Refusal as error:
        return f"{UNREADABLE}: {error}"
    except TimeoutError:
        return f"{UNREADABLE} within {JOB.seconds:g} s"
    except ProcessEndedError:
        return f"{UNREADABLE}: it refers to itself too deeply, or takes too much memory"
    return ""


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
