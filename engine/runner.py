"""Runs one step on the device: batch -> hidden states -> logits of the rows that sample -> tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.linear import padded_rows
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from .kv.cache import KVCache
from .logprobs import TokenLogprobs, token_logprobs
from .request import Request
from .sampler import SampledToken, Sampler, SampleRow


class CausalLM(Protocol):
    """What the runner needs of a model; see ``models/llama.py``."""

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave one request: a token if it reached the end of what is known, prompt log-probabilities if asked.

    ``prompt_logprobs`` belong to the tokens at positions ``item.start + 1 ..``.
    """

    item: ScheduledRequest
    token: SampledToken | None
    prompt_logprobs: list[TokenLogprobs] | None


class Pending:
    """A step under way on the device."""

    def __init__(self, results: list[StepResult]):
        self._results = results

    def wait(self) -> list[StepResult]:
        """Blocks until the step's tokens are on the host; one result for each item of the batch, in order.

        May be called once. An error of the device is raised here.
        """
        return self._results


class Runner:
    """Owns the model and the sampler of an engine. Steps are repeatable: a failed one may simply be run again."""

    def __init__(self, model: CausalLM, cache: KVCache, device: torch.device):
        self.model, self.cache, self.device = model, cache, device
        self.sampler = Sampler()

    def run(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> list[StepResult]:
        """``launch`` and ``wait`` in one."""
        return self.launch(batch, rows).wait()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> Pending:
        """Enqueues a step: the KV of every scheduled token, and a token where a request's last one was reached.

        ``rows`` holds the sampling state of each request; it and the block tables are read before this returns, so
        both may change while the step is under way. On the CPU the step has been computed when this returns.
        """
        items = batch.items
        ids = [t for item in items for t in item.request.token_ids[item.start : item.end]]
        positions = [p for item in items for p in range(item.start, item.end)]
        num_tokens = len(ids)
        padding = [0] * (padded_rows(num_tokens, self.device) - num_tokens)
        step = self.cache.begin_step(batch)
        hidden = self.model(
            torch.tensor(ids + padding, device=self.device), torch.tensor(positions + padding, device=self.device), step
        )[:num_tokens]
        tokens = self._sample(hidden, items, rows)
        prompt = self._prompt_logprobs(hidden, items)
        return Pending([StepResult(item, tokens.get(i), prompt.get(i)) for i, item in enumerate(items)])

    def _sample(
        self, hidden: Tensor, items: list[ScheduledRequest], rows: Mapping[Request, SampleRow]
    ) -> dict[int, SampledToken]:
        last, sampling = -1, []
        for i, item in enumerate(items):
            last += item.num_tokens
            if item.samples:
                sampling.append((i, last))
        if not sampling:
            return {}
        states = [rows[items[i].request] for i, _ in sampling]
        sampled = self.sampler.sample(self._logits(hidden, [row for _, row in sampling]), states)
        return {i: token for (i, _), token in zip(sampling, sampled, strict=True)}

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits of some rows of ``hidden`` [N, E]."""
        num_rows = padded_rows(len(rows), self.device)
        if rows != list(range(len(hidden))) or num_rows > len(rows):
            padding = rows[:1] * (num_rows - len(rows))
            hidden = hidden[torch.tensor(rows + padding, device=self.device)]
        return self.model.compute_logits(hidden)[: len(rows)]

    def _prompt_logprobs(self, hidden: Tensor, items: list[ScheduledRequest]) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow each computed one, for the requests that ask."""
        found, first = {}, 0
        for i, item in enumerate(items):
            wanted, request = item.request.params.prompt_logprobs, item.request
            targets = request.prompt_token_ids[item.start + 1 : item.end + 1]
            if wanted is not None and targets:
                logits = self._logits(hidden, list(range(first, first + len(targets))))
                found[i] = token_logprobs(logits, targets, wanted)
            first += item.num_tokens
        return found
