"""From hidden states to tokens and log-probabilities, alike on every device."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.linear import padded_rows
from qkv_engine.kernels.to_device import to_device
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

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor: ...

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


def read_hidden(model: CausalLM, hidden: Tensor, command: StepCommand, lengths: list[int]) -> Computed:
    """The results that ``command`` asks for, from its hidden states [N, E]; ``lengths``: tokens of each item."""
    ends = list(accumulate(lengths))
    tokens = None
    if command.sampling:
        logits = _logits(model, hidden, [ends[i] - 1 for i in command.sampling])
        tokens = sample_tokens(logits, command.tables)
    found = {}
    for item, targets, k, others in command.prompt_scores:
        first = ends[item] - lengths[item]
        logits = _logits(model, hidden, list(range(first, first + len(targets))))
        found[item] = token_logprobs(logits, targets, k, others)
    return Computed(tokens, False, found)


def _logits(model: CausalLM, hidden: Tensor, rows: list[int]) -> Tensor:
    """Logits of some rows of ``hidden`` [N, E]."""
    num_rows = padded_rows(len(rows), hidden.device)
    if rows != list(range(len(hidden))) or num_rows > len(rows):
        padding = rows[:1] * (num_rows - len(rows))
        hidden = hidden[to_device(torch.tensor(rows + padding), hidden.device)]
    return model.compute_logits(hidden)[: len(rows)]
