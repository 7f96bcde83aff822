"""The runner: a scheduled batch becomes a command, a backend carries it out, its tokens go back to the items."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..kv.moves import MoveCommand, Wave
from ..kv.table_rows import TableLayout, TableRows
from ..request import Request
from ..sampling.sample_row import SampleRow
from .backend import Backend, NoBackend
from .cache import KVCache
from .host_memory import HostMemory
from .logits import Computed
from .logprobs import TokenLogprobs
from .mover import PendingMoves
from .prepare import StepMaker
from .sampler import SampledToken


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
        backend: Backend,
        computed: Computed,
        places: Sequence[int | None] | None,
    ):
        """``places``: index in the tokens of each item's token; ``None`` if they are in the items' order."""
        self._items, self._backend, self._computed, self._places = items, backend, computed, places

    def wait(self) -> StepResult:
        """Blocks until the step's tokens are on the host.

        May be called once. An error of the device, or the loss of a rank, is raised here.
        """
        items, places, prompt = self._items, self._places, self._computed.prompt_logprobs
        token_ids, special = self._backend.wait(self._computed)
        if places is None:
            return StepResult(items, token_ids[: len(items)], special, prompt)
        found = {i: special[place] for i, place in enumerate(places) if place is not None and place in special}
        return StepResult(items, [None if place is None else token_ids[place] for place in places], found, prompt)


class Runner:
    """Has a backend carry out steps and moves.

    A failed step may simply be run again, but for one that goes on from states, which it may have rewritten.
    """

    def __init__(self, cache: KVCache, backend: Backend, layout: TableLayout, host: HostMemory | None = None):
        """``layout``: of the block tables that ``backend`` keeps. ``host``: its host memory, for the next one, too."""
        self.cache, self.host = cache, host
        self.begin(backend, layout)

    def begin(self, backend: Backend, layout: TableLayout) -> None:
        """Goes on with another backend, whose block tables are empty."""
        self.backend, self._maker = backend, StepMaker(TableRows(layout))

    def put_away(self) -> None:
        """Gives the device the backend with the model back, and KV memory, in which nothing may be left."""
        is_cuda, self.backend = self.cache.memory.is_cuda, NoBackend()
        self.cache.put_away()
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()

    def run(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> StepResult:
        """``launch`` and ``wait`` in one."""
        return self.launch(batch, rows).wait()

    def check_device(self) -> None:
        """See ``Backend.check``."""
        self.backend.check()

    def check_resize(self, nbytes: int) -> None:
        """See ``KVCache.check_resize``."""
        self.cache.check_resize(nbytes)

    def dig(self, hole: tuple[int, int]) -> None:
        """Has memory be held everywhere but in ``hole``, at once. Raises ``CapacityError`` if the device lacks some."""
        self.backend.move(MoveCommand([Wave([], [], [], hole)], []))

    def launch_moves(self) -> PendingMoves:
        """Enqueues the moves that stand in the books; they go ahead of the next step."""
        return self.cache.launch_moves(self.backend)

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
            computed = self.backend.step(command)
        except BaseException:
            self._maker.forget()
            raise
        places = _places(batch.items, sampling, sampling if computed.of_all_items else range(len(sampling)))
        return Pending(batch.items, self.backend, computed, places)


def _places(items: list[ScheduledRequest], sampling: Sequence[int], rows: Sequence[int]) -> list[int | None] | None:
    """Index of each item's result, if the items ``sampling`` have the ``rows``; ``None`` if all do, in order."""
    if len(sampling) == len(items):
        return None
    places: list[int | None] = [None] * len(items)
    for i, row in zip(sampling, rows, strict=True):
        places[i] = row
    return places
