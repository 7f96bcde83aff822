"""The runner: one step on the device, batch -> hidden states -> logits of the rows that sample -> tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.device.pinned import to_device
from qkv_engine.kernels.linear import padded_rows
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.config import ModelConfig
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..errors import DeviceLostError
from ..kv.cache import KVCache
from ..request import Request
from ..sampling.logprobs import TokenLogprobs, token_logprobs
from ..sampling.sampler import PendingTokens, SampledToken, SampledTokens, Sampler, SampleRow
from .memory import is_out_of_memory
from .steady_batch import SteadyBatch, prompt_targets

if TYPE_CHECKING:
    from .captures import Captured
    from .gpu_steps import GpuSteps


class CausalLM(Protocol):
    """A model as the runner calls it; see ``models/llama.py``."""

    config: ModelConfig

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class StepResult(NamedTuple):
    """Results of a step: a token for each item that reached the end of its known tokens, else None.

    ``special`` and ``prompt_logprobs`` by item index: the whole result of a token with log-probabilities or an error,
    and log-probabilities of the prompt's tokens at positions ``item.start + 1 ..``.
    """

    items: Sequence[ScheduledRequest]
    token_ids: Sequence[int | None]
    special: Mapping[int, SampledToken]
    prompt_logprobs: Mapping[int, list[TokenLogprobs]]


class Pending:
    """A step under way on the device."""

    def __init__(
        self,
        items: Sequence[ScheduledRequest],
        tokens: PendingTokens | None,
        places: Sequence[int | None] | None,
        prompt_logprobs: Mapping[int, list[TokenLogprobs]],
    ):
        """``places``: index in ``tokens`` of each item's token; ``None`` if they are in the items' order."""
        self._items, self._tokens, self._places = items, tokens, places
        self._prompt_logprobs = prompt_logprobs

    def wait(self) -> StepResult:
        """Blocks until the step's tokens are on the host.

        May be called once. An error of the device is raised here.
        """
        items, places, prompt = self._items, self._places, self._prompt_logprobs
        token_ids, special = SampledTokens([], {}) if self._tokens is None else self._tokens.wait()
        if places is None:
            return StepResult(items, token_ids[: len(items)], special, prompt)
        found = {i: special[place] for i, place in enumerate(places) if place is not None and place in special}
        return StepResult(items, [None if place is None else token_ids[place] for place in places], found, prompt)


class Runner:
    """Owns the model and the sampler of an engine. Steps are repeatable: a failed one may simply be run again."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        device: torch.device,
        *,
        max_num_seqs: int = 1,
        max_model_len: int = 1,
        cuda_graphs: bool = True,
    ):
        self.model, self.cache, self.device = model, cache, device
        self.sampler = Sampler()
        self._gpu: GpuSteps | None = None
        self._steady: SteadyBatch | None = None  # of the last step launched
        if device.type == "cuda":
            from .gpu_steps import GpuSteps  # needs Triton

            self._gpu = GpuSteps(model, cache, max_num_seqs, max_model_len, cuda_graphs)

    def run(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> StepResult:
        """``launch`` and ``wait`` in one."""
        return self.launch(batch, rows).wait()

    def capture_all(self, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> Captured | None:
        """Captures every step that the limits allow, see ``capture_all``; ``None`` without a GPU or graphs."""
        if self._gpu is None or self._gpu.mixed is None:
            return None
        from .captures import capture_all

        with torch.inference_mode():
            return capture_all(self._gpu, max_num_seqs, max_model_len, max_num_batched_tokens)

    def check_device(self) -> None:
        """Raises ``DeviceLostError`` if the device computes nothing any more, as after an illegal access to memory."""
        if self.device.type == "cpu":
            return
        try:
            torch.ones(1, device=self.device).sum().item()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise DeviceLostError(
                    f"the device {self.device} is lost: {error}", remedy="Make a new process"
                ) from error

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> Pending:
        """Enqueues a step: the KV of every scheduled token, and a token where a request's last one was reached.

        ``rows`` holds the sampling state of each request; it and the block tables are read before this returns, so
        both may change while the step is under way. On the CPU the step has been computed when this returns.

        On a GPU a step may be launched before the one before it was waited for: an item may begin just behind the
        tokens that the host knows of its request, at the token that the step before samples. The batch must say that
        such an item samples, since ``rows`` lack the missing token. After an error all tokens must be known.
        """
        try:
            return self._launch(batch, rows)
        except BaseException:
            self._steady = None
            if self._gpu is not None:
                self._gpu.tables.forget()
            raise

    def _launch(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> Pending:
        items, steady = batch.items, self._steady
        continues = steady is not None and steady.continues(items)
        if steady is None or not continues:
            steady = self._steady = SteadyBatch(items, rows)
        steady.note_positions(items)
        if self._gpu is not None and steady.is_decode:
            return self._launch_decode(self._gpu, items, steady, continues)
        hidden = self._forward(batch) if self._gpu is None else self._gpu.forward(items)
        tokens = self._sample(hidden, items, steady)
        if self._gpu is not None and tokens is not None:
            self._gpu.keep_tokens(steady.sampling, tokens.token_ids)
        places = _places(items, steady.sampling, range(len(steady.sampling)))
        return Pending(items, tokens, places, self._prompt_logprobs(hidden, items))

    def _forward(self, batch: ScheduledBatch) -> Tensor:
        """Hidden states [N, E] of the batch's tokens, on the CPU."""
        items = batch.items
        ids = [t for item in items for t in item.request.token_ids[item.start : item.end]]
        positions = [p for item in items for p in range(item.start, item.end)]
        num_tokens = len(ids)
        padding = [0] * (padded_rows(num_tokens, self.device) - num_tokens)
        step = self.cache.begin_step(batch)
        return self.model(torch.tensor(ids + padding), torch.tensor(positions + padding), step)[:num_tokens]

    def _launch_decode(
        self, gpu: GpuSteps, items: list[ScheduledRequest], steady: SteadyBatch, continues: bool
    ) -> Pending:
        """Launches a step of single tokens alone: greedy tokens come from its graph, all others from the sampler."""
        logits = gpu.decode(items, goes_on=continues)
        sampling = steady.sampling
        if steady.is_plain:
            return Pending(items, gpu.likeliest(), _places(items, sampling, sampling), {})
        if len(sampling) < len(items):
            logits = logits[to_device(torch.tensor(sampling), self.device)]
        tokens = self.sampler.launch(logits, steady.states)
        gpu.keep_tokens(sampling, tokens.token_ids)
        return Pending(items, tokens, _places(items, sampling, range(len(sampling))), {})

    def _sample(self, hidden: Tensor, items: list[ScheduledRequest], steady: SteadyBatch) -> PendingTokens | None:
        if not steady.sampling:
            return None
        ends = list(accumulate(item.num_tokens for item in items))
        return self.sampler.launch(self._logits(hidden, [ends[i] - 1 for i in steady.sampling]), steady.states)

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits of some rows of ``hidden`` [N, E]."""
        num_rows = padded_rows(len(rows), self.device)
        if rows != list(range(len(hidden))) or num_rows > len(rows):
            padding = rows[:1] * (num_rows - len(rows))
            hidden = hidden[to_device(torch.tensor(rows + padding), self.device)]
        return self.model.compute_logits(hidden)[: len(rows)]

    def _prompt_logprobs(self, hidden: Tensor, items: list[ScheduledRequest]) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow each computed one, for the requests that ask."""
        found, first = {}, 0
        for i, item in enumerate(items):
            wanted, targets = item.request.params.prompt_logprobs, prompt_targets(item)
            if wanted is not None and targets:
                logits = self._logits(hidden, list(range(first, first + len(targets))))
                found[i] = token_logprobs(logits, targets, wanted)
            first += item.num_tokens
        return found


def _places(items: list[ScheduledRequest], sampling: Sequence[int], rows: Sequence[int]) -> list[int | None] | None:
    """Index of each item's result, if the items ``sampling`` have the ``rows``; ``None`` if all do, in order."""
    if len(sampling) == len(items):
        return None
    places: list[int | None] = [None] * len(items)
    for i, row in zip(sampling, rows, strict=True):
        places[i] = row
    return places
