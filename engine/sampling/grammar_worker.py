"""Compiles grammars and asks for their first tokens: the worker of a sandbox, which runs this file by its path.

llguidance recurses as deeply as a grammar refers to itself, and ends the process that it runs in where the stack ends.
What has passed here, on a small stack, is safe on the larger ones of the engine's threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

STACK_BYTES = 1 << 20  # for some hundred references in a row; a thread has eight times as much, if the system allows
MAX_LEXER_STATES = 50_000  # of one grammar; each takes about 2 kB


class GrammarError(Exception):
    """A grammar with a mistake, or beyond llguidance's limits."""


class Worker:
    """A model's tokens."""

    def __init__(self, setup: bytes):
        """``setup`` are the arguments of ``make_table`` as JSON."""
        import llguidance

        self._library = llguidance
        self._table = make_table(llguidance, *json.loads(setup))

    def answer(self, request: bytes) -> bytes:
        """Nothing for a grammar that compiles and allows a token. Raises GrammarError."""
        failures: list[BaseException] = []

        def check() -> None:
            try:
                matcher = make_matcher(self._library, self._table, request.decode())
                matcher.compute_bitmask()
                check_matcher(matcher)
            except BaseException as error:  # panics of libraries in Rust are no Exception
                failures.append(error)

        threading.stack_size(stack_bytes())
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]
        return b""


def stack_bytes() -> int:
    """Bytes of the trial's stack: at most half of those that the system gives the engine's threads (``ulimit -s``)."""
    try:
        import resource
    except ImportError:  # Windows
        return STACK_BYTES
    most = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return STACK_BYTES if most == resource.RLIM_INFINITY else min(STACK_BYTES, most // 2)


def make_table(library: Any, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The tokens of a tokenizer.json for ``library``, llguidance."""
    return library.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))


def make_matcher(library: Any, table: Any, grammar: str) -> Any:
    """The matcher of a grammar in llguidance's form. Raises GrammarError.

    The library's own bounds hold for each mask, on some 15 ms; a grammar's error is a line, not the parser's state.
    """
    limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = library.LLMatcher(table, grammar, log_level=0, limits=limits)
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: Any) -> None:
    """Raises GrammarError with the first line of what llguidance says, if it has given up."""
    if matcher.is_error():
        lines = [line for line in matcher.get_error().splitlines() if line.strip()]
        text = lines[0].strip()[:200] if lines else "llguidance gave up"
        raise GrammarError("no text has this form" if text.startswith("NoExtension") else text)
