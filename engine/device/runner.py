"""The runner: a scheduled batch becomes a command, a backend carries it out, its tokens go back to the items."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..errors import DeviceLostError
from ..kv.table_rows import TableLayout, TableRows
from ..parallel.commands import Capture
from ..parallel.led import LedMover, LedSteps
from ..request import Request
from ..sampling.sample_row import SampleRow
from .backend import Steps, make_steps
from .cache import KVCache
from .logits import CausalLM
from .logprobs import TokenLogprobs
from .memory import is_out_of_memory
from .prepare import StepMaker
from .sampler import PendingTokens, SampledToken, SampledTokens

if TYPE_CHECKING:
    from ..parallel.worker_group import WorkerGroup
    from .gpu.captures import Captured


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
        workers: WorkerGroup | None = None,
    ):
        """``places``: index in ``tokens`` of each item's token; ``None`` if they are in the items' order."""
        self._workers = workers
        self._items, self._tokens, self._places = items, tokens, places
        self._prompt_logprobs = prompt_logprobs

    def wait(self) -> StepResult:
        """Blocks until the step's tokens are on the host.

        May be called once. An error of the device, or the loss of a rank, is raised here.
        """
        items, places, prompt = self._items, self._places, self._prompt_logprobs
        with nullcontext() if self._workers is None else self._workers.waiting():
            token_ids, special = SampledTokens([], {}) if self._tokens is None else self._tokens.wait()
        if self._workers is not None:
            self._workers.check()  # an exchange that was broken off gives any numbers
        if places is None:
            return StepResult(items, token_ids[: len(items)], special, prompt)
        found = {i: special[place] for i, place in enumerate(places) if place is not None and place in special}
        return StepResult(items, [None if place is None else token_ids[place] for place in places], found, prompt)


class Runner:
    """Owns the backend of an engine. Steps are repeatable: a failed one may simply be run again."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        device: torch.device,
        *,
        max_num_seqs: int = 1,
        max_model_len: int = 1,
        cuda_graphs: bool = True,
        workers: WorkerGroup | None = None,
    ):
        """``workers``: the other ranks under tensor parallelism, which carry out all commands too."""
        self.cache, self.device, self._workers = cache, device, workers
        self.layout = TableLayout.of(cache.tables, max_num_seqs, max_model_len)
        self._maker = StepMaker(TableRows(self.layout, cache.ladder.spec.group))
        self._own = make_steps(model, cache.memory, self.layout, cache.ladder, cuda_graphs)
        self.steps: Steps = self._own
        if workers is not None:
            self.steps, cache.mover = LedSteps(workers, self._own), LedMover(workers, cache.mover)

    def run(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> StepResult:
        """``launch`` and ``wait`` in one."""
        return self.launch(batch, rows).wait()

    def capture_all(self, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> Captured | None:
        """Captures every step that the limits allow, see ``capture_all``; ``None`` without a GPU or graphs."""
        if self.device.type != "cuda":
            return None
        from .gpu.captures import StepShape, capture_all
        from .gpu.steps import GpuSteps

        steps, workers = self._own, self._workers
        if not isinstance(steps, GpuSteps) or steps.mixed is None:
            return None

        def capture(shape: StepShape) -> None:
            if workers is None:
                steps.capture(shape)
            else:
                workers.lead(Capture(pickle.dumps(shape)), lambda: steps.capture(shape))

        limits = max_num_seqs, max_model_len, max_num_batched_tokens
        with torch.inference_mode():
            return capture_all(steps, capture, self.cache.tables, *limits)

    def check_device(self) -> None:
        """Raises ``DeviceLostError`` if the device computes nothing any more, as after an illegal access to memory.

        Raises ``RankLostError`` if the process of another rank ended.
        """
        if self._workers is not None:
            self._workers.check()
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
            command, sampling = self._maker.make(batch, rows, self.cache.tables)
            computed = self.steps.execute(command)
        except BaseException:
            self._maker.forget()
            raise
        places = _places(batch.items, sampling, sampling if computed.of_all_items else range(len(sampling)))
        return Pending(batch.items, computed.tokens, places, computed.prompt_logprobs, self._workers)


def _places(items: list[ScheduledRequest], sampling: Sequence[int], rows: Sequence[int]) -> list[int | None] | None:
    """Index of each item's result, if the items ``sampling`` have the ``rows``; ``None`` if all do, in order."""
    if len(sampling) == len(items):
        return None
    places: list[int | None] = [None] * len(items)
    for i, row in zip(sampling, rows, strict=True):
        places[i] = row
    return places
