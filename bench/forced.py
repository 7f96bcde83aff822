"""Texts under teacher forcing: what a preset makes of each given token, beside what the reference makes of it.

One pass a text. The tokens that are scored attend to the quantized cache as they do when they are generated. Of the
reference's distribution its likeliest tokens are kept and the mass of the rest, never a row of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from qkv_engine.errors import RequestError
from qkv_engine.request import Logprob, RequestOutput, SamplingParams
from qkv_engine.validation import MAX_LOGPROBS

from .scoring import ScoringEngine, scoring_params

TOKENS_AT_ONCE = 2**15  # handed over together: their log-probabilities take some 100 MB on the host
LEAST_MASS = 1e-7  # of all tokens but the likeliest: what is less is lost in the rounding of their sum


class ForcedText(NamedTuple):
    """Token ids of a text. The first ``num_prefill`` are computed as a prompt; those from ``first_scored`` on count."""

    ids: list[int]
    num_prefill: int
    first_scored: int


class Choices(NamedTuple):
    """The likeliest tokens in the place of each scored one: ids and log-probabilities [T, K], likeliest first."""

    ids: Tensor
    logprobs: Tensor


class TextScore(NamedTuple):
    """A text with one preset, summed over its scored tokens.

    ``kl``: divergence from the reference in nats; ``changed``: tokens in whose place the reference's first choice is
    not the first. ``nll``: negative log-likelihood in nats. ``exact``: every token is a first choice, so greedy
    decoding gives the text to the letter.
    """

    tokens: int
    kl: float
    changed: int
    nll: float
    exact: bool


class Forced(NamedTuple):
    """The scores of texts with one preset, and the fewest bits of any block that was read; None if there was none."""

    scores: list[TextScore]
    lowest_bits: float | None


def refer(engine: ScoringEngine, texts: Sequence[ForcedText]) -> tuple[Forced, list[Choices]]:
    """The scores of ``texts`` with the preset that others are compared with, and its likeliest tokens.

    Raises ``RequestError`` for a text that cannot be computed.
    """
    scores, choices, bits = list[TextScore](), list[Choices](), list[float | None]()
    for text, output in _outputs(engine, texts, [_params(text, MAX_LOGPROBS) for text in texts]):
        entries = _scored(text, output)
        choices.append(_likeliest(entries))
        scores.append(_score(text, entries, 0.0, 0))
        bits.append(output.kv.lowest_bits)
    return Forced(scores, _least(bits)), choices


def compare(engine: ScoringEngine, texts: Sequence[ForcedText], reference: Sequence[Choices]) -> Forced:
    """The scores of ``texts``, of which ``reference`` has what ``refer`` found. Raises ``RequestError`` as it does."""
    scores, bits = list[TextScore](), list[float | None]()
    params = [_naming(text, choices) for text, choices in zip(texts, reference, strict=True)]
    found = _outputs(engine, texts, params)
    for choices, (text, output) in zip(reference, found, strict=True):
        entries = _scored(text, output)
        named = list(zip(entries, choices.ids.tolist(), strict=True))
        logprobs = torch.tensor([[entry[token].logprob for token in ids] for entry, ids in named])
        changed = sum(entry[ids[0]].rank > 1 for entry, ids in named)
        scores.append(_score(text, entries, float(divergence(choices.logprobs, logprobs).sum()), changed))
        bits.append(output.kv.lowest_bits)
    return Forced(scores, _least(bits))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL divergence in nats [T] of distributions whose K likeliest tokens under p have log-probabilities p, q [T, K].

    All other tokens count as one: sum p (log p - log q) over K + 1 outcomes, which is never more than over all.
    """
    p, q = p.double(), q.double()
    rest_p, rest_q = ((1 - x.exp().sum(dim=-1)).clamp(min=LEAST_MASS) for x in (p, q))
    return (p.exp() * (p - q)).sum(dim=-1) + rest_p * (rest_p / rest_q).log()


def _params(text: ForcedText, num_likeliest: int) -> SamplingParams:
    return replace(scoring_params(text.num_prefill), prompt_logprobs=num_likeliest)


def _naming(text: ForcedText, choices: Choices) -> SamplingParams:
    """Parameters that ask for the reference's tokens in the places that are scored."""
    named = [*([] for _ in range(text.first_scored)), *choices.ids.tolist()]
    return replace(_params(text, 0), prompt_logprob_ids=named)


def _outputs(
    engine: ScoringEngine, texts: Sequence[ForcedText], params: Sequence[SamplingParams]
) -> Iterator[tuple[ForcedText, RequestOutput]]:
    """Each text with its output, so many handed over at once as ``TOKENS_AT_ONCE`` allow, at least one."""
    first = 0
    while first < len(texts):
        last, num_tokens = first + 1, len(texts[first].ids)
        while last < len(texts) and num_tokens + len(texts[last].ids) <= TOKENS_AT_ONCE:
            num_tokens += len(texts[last].ids)
            last += 1
        group = texts[first:last]
        yield from zip(group, engine.generate([text.ids for text in group], list(params[first:last])), strict=True)
        first = last


def _scored(text: ForcedText, output: RequestOutput) -> list[dict[int, Logprob]]:
    """What is known of each scored token's place."""
    if output.error is not None or output.prompt_logprobs is None:
        raise RequestError(f"a text cannot be scored: {output.error}")
    return [entry for entry in output.prompt_logprobs[text.first_scored :] if entry is not None]


def _likeliest(entries: Sequence[dict[int, Logprob]]) -> Choices:
    """The likeliest tokens of each place; the text's own, which is known too, only if it is among them."""
    kept = min(MAX_LOGPROBS, *map(len, entries))
    best = [sorted(entry.items(), key=lambda pair: -pair[1].logprob)[:kept] for entry in entries]
    ids = torch.tensor([[token for token, _ in row] for row in best], dtype=torch.int32)
    return Choices(ids, torch.tensor([[found.logprob for _, found in row] for row in best]))


def _score(text: ForcedText, entries: Sequence[dict[int, Logprob]], kl: float, changed: int) -> TextScore:
    own = [entry[token] for entry, token in zip(entries, text.ids[text.first_scored :], strict=True)]
    nll = -sum(one.logprob for one in own)
    return TextScore(len(own), kl, changed, nll, all(one.rank == 1 for one in own))


def _least(bits: Sequence[float | None]) -> float | None:
    return min((one for one in bits if one is not None), default=None)
