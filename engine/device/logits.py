"""From hidden states to tokens and log-probabilities, alike on every device."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.linear import padded_rows
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.ranks import Ranks

from .command import StepCommand
from .logprobs import TokenLogprobs, token_logprobs
from .sampler import PendingTokens, SampledTokens, sample_tokens


class CausalLM(Protocol):
    """A model as a step calls it; see ``models/llama.py``."""

    config: ModelConfig
    ranks: Ranks

    def __call__(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None = None
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class Computed(NamedTuple):
    """Results of a command that the device may still be computing.

    ``tokens``: of the items that sample, in order, or with ``of_all_items`` one for each item. ``prompt_logprobs``: by
    item, of the tokens that ``StepCommand.prompt_scores`` names.
    """

    tokens: PendingTokens | None
    of_all_items: bool
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def wait(self) -> SampledTokens:
        """Blocks until the tokens are on the host."""
        return SampledTokens([], {}) if self.tokens is None else self.tokens.wait()


def wanted_rows(command: StepCommand, lengths: list[int], device: torch.device) -> Tensor | None:
    """Places [M] int64, on the host, of the tokens that the results of ``command`` are read from on ``device``.

    First those that sample, then those of each of ``prompt_scores``: pieces that ``read_hidden`` reads one by one. Each
    is padded to the rows of a fast product, and so are all together; where nothing is asked there is a single row.
    ``None``: the command asks for all tokens in order. ``lengths``: tokens of each item.
    """
    ends = list(accumulate(lengths))
    pieces = [[ends[i] - 1 for i in command.sampling]] if command.sampling else []
    for scores in command.prompt_scores:
        first = ends[scores.item] - lengths[scores.item]
        pieces.append(list(range(first, first + len(scores.targets))))
    if len(pieces) == 1 and len(pieces[0]) == ends[-1] and pieces[0] == list(range(ends[-1])):
        return None
    rows = [row for piece in pieces for row in _padded(piece, device)] or [0]
    return torch.tensor(_padded(rows, device))


def asked_tokens(command: StepCommand, lengths: list[int]) -> list[int]:
    """Of each item with so many tokens how many of the last ones the results of ``command`` are read from."""
    asked = [0] * len(lengths)
    for item in command.sampling:
        asked[item] = 1
    for scores in command.prompt_scores:
        asked[scores.item] = lengths[scores.item]
    return asked


def compute_hidden(
    model: CausalLM, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None
) -> Tensor:
    """Hidden states [M, E] of the tokens ``rows`` [M], or [N, E] of all for ``None``.

    The last layer leaves tokens out where fewer are wanted: with padding those of a scored prompt may be more.
    """
    if rows is None or len(rows) < len(input_ids):
        return model(input_ids, positions, batch, rows)
    return model(input_ids, positions, batch)[rows]


def read_hidden(model: CausalLM, hidden: Tensor, command: StepCommand) -> Computed:
    """The results that ``command`` asks for, from the hidden states [M, E] of its ``wanted_rows``."""
    tokens, start = None, 0
    if command.sampling:
        number = len(command.sampling)
        start = padded_rows(number, hidden.device)
        tokens = sample_tokens(model.compute_logits(hidden[:start])[:number], command.tables)
    found = {}
    for item, targets, k, others in command.prompt_scores:
        end = start + padded_rows(len(targets), hidden.device)
        logits = model.compute_logits(hidden[start:end])[: len(targets)]
        found[item] = token_logprobs(logits, targets, k, others)
        start = end
    return Computed(tokens, False, found)


def _padded(rows: list[int], device: torch.device) -> list[int]:
    """``rows`` and the first of them, as often as products on ``device`` are padded."""
    return rows + rows[:1] * (padded_rows(len(rows), device) - len(rows))
