"""Log-likelihoods of continuations, whose tokens attend to the quantized cache as they do when they are generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from qkv_engine.errors import RequestError
from qkv_engine.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.text.tokenizer import Tokenizer

TOKENS_AT_ONCE = 2**20  # handed over together: their log-probabilities take some 300 MB on the host


class ScoringEngine(Protocol):
    """The part of ``Engine`` for scoring."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def max_model_len(self) -> int: ...

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, use_tqdm: bool = False
    ) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def reset_stats(self) -> None: ...


class Pair(NamedTuple):
    """Token ids of a context, at least one, which is computed as a prompt, and of its continuation, which is scored."""

    context: list[int]
    continuation: list[int]

    @property
    def ids(self) -> list[int]:
        return self.context + self.continuation


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats.

    ``is_greedy`` says that each of its tokens is a likeliest one; ``lowest_bits`` are the fewest of any block read.
    """

    logprob: float
    is_greedy: bool
    lowest_bits: float | None


def max_pair_tokens(engine: ScoringEngine) -> int:
    """Tokens of the longest pair: every request samples a token, which needs a place in the context."""
    return engine.max_model_len - 1


def score(engine: ScoringEngine, pairs: Sequence[Pair], *, use_tqdm: bool = False) -> Iterator[Score]:
    """The score of each pair, in order. Raises ``RequestError`` if one cannot be computed."""
    for group in _groups(pairs):
        params = [scoring_params(len(pair.context)) for pair in group]
        outputs = engine.generate([pair.ids for pair in group], params, use_tqdm=use_tqdm)
        yield from map(_score, group, outputs)


def scoring_params(num_context_tokens: int) -> SamplingParams:
    """Parameters of a request that scores the tokens of its prompt behind the context."""
    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, num_prefill_tokens=num_context_tokens, detokenize=False
    )


def _groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    group, num_tokens = list[Pair](), 0
    for pair in pairs:
        if group and num_tokens + len(pair.ids) > TOKENS_AT_ONCE:
            yield group
            group, num_tokens = [], 0
        group.append(pair)
        num_tokens += len(pair.ids)
    if group:
        yield group


def _score(pair: Pair, output: RequestOutput) -> Score:
    if output.error is not None or output.prompt_logprobs is None:
        raise RequestError(f"a text cannot be scored: {output.error}")
    first = len(pair.context)
    found = [
        entry[token_id]
        for token_id, entry in zip(pair.continuation, output.prompt_logprobs[first:], strict=True)
        if entry is not None
    ]
    logprob = sum(one.logprob for one in found)
    return Score(logprob, all(one.rank == 1 for one in found), output.kv.lowest_bits)
