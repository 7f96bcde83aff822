"""The model of a simulation: what a step writes, reads and samples on the fake device, and who holds bad values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qkv_engine.device.sampler import SampledToken
from qkv_engine.errors import RequestError
from qkv_engine.request import Request

from .broken import require
from .device import Device, Record, mix
from .spy import SpySpace
from .truth import Truth, token

if TYPE_CHECKING:
    from .simulator import Simulation


class Fault(Exception):
    """The device cannot compute a step."""


class Model:
    """Computes steps, and checks that each request reads the KV that it has when it runs alone.

    ``truths`` are those of live requests. Steps with a ``doomed`` request break off. ``tainted`` requests read bad
    values before anybody knew; ``unknown`` blocks hold such values, and nobody knows yet.
    """

    def __init__(self, simulation: Simulation):
        self.simulation, self.options, self.rng = simulation, simulation.options, simulation.rng
        self.truths: dict[Request, Truth] = {}
        self.doomed: set[Request] = set()
        self.tainted: set[Request] = set()
        self.unknown: set[Any] = set()
        self.goes_on = False  # whether the last step goes on from tokens before it

    @property
    def _space(self) -> SpySpace:
        return self.simulation.space

    @property
    def _device(self) -> Device:
        return self.simulation.device

    def begin(self, request: Request) -> None:
        """Takes up a new request."""
        self.truths[request] = Truth(request, self.options.groups)

    def forget_bad(self) -> None:
        """Notes that all KV is computed anew."""
        self.tainted.clear()
        self.unknown.clear()

    def begin_calm(self) -> None:
        """Notes that all have to finish from here on: with states no fault is left, which would have all start over."""
        if self.options.num_states:
            self.doomed.clear()

    @property
    def _fault_rate(self) -> float:
        """Share of requests that fail in a step."""
        return 0.0 if self.simulation.is_calm and self.options.num_states else self.options.faults

    def forgives_states(self) -> bool:
        """Ends all faults if the last step went on from states, which is never run again; whether it did.

        The engine would try its requests one by one, which nothing here does.
        """
        if self.options.num_states and self.goes_on:
            self.doomed.clear()
            return True
        return False

    def run_again(self) -> None:
        """Notes that a step broke off: until this call of ``step`` ends, its tokens may be written again."""
        self._device.runs_again = True

    def told(self, bad: set[Any]) -> None:
        """Notes that the core knows these blocks to be bad from here on."""
        self.unknown -= bad

    def spoil(self, blocks: set[Any]) -> None:
        for block in blocks:
            self._device.spoil(block)
        self.unknown |= blocks

    def compute(self, batch: Any) -> tuple[list[tuple[Any, SampledToken | None]], Fault | None]:
        """Computes a step; now and then it breaks off: before or after it wrote, or when it is waited for."""
        rng, faults = self.rng, self._fault_rate
        self.doomed.update(item.request for item in batch.items if rng.random() < faults / 2)
        broken = any(item.request in self.doomed for item in batch.items) and rng.choice(("soon", "late", "later"))
        self.goes_on = any(item.start for item in batch.items)
        if broken in ("soon", "late"):
            self.run_again()
        if broken == "soon":
            raise Fault("on purpose")
        for item in batch.items:
            if not self._follows_nothing(item):
                self._write(item)
                self._write_states(item)
        if broken == "late":
            raise Fault("on purpose")
        found = [(item, self._sample(item, rng.random() < faults / 2)) for item in batch.items]
        self._spoil_states(batch)
        return found, Fault("on purpose") if broken else None

    def _follows_nothing(self, item: Any) -> bool:
        """Whether the step before failed to give the token that this item starts with."""
        missing = item.end > len(self.truths[item.request].tokens)
        require(not missing or item.request in self.tainted, "a token is missing")
        return missing

    def _sample(self, item: Any, is_bad: bool) -> SampledToken | None:
        """Reads the cache as the step sees it; returns the next token of a request that is at its end."""
        request, truth = item.request, self.truths[item.request]
        if self._follows_nothing(item):
            return SampledToken(-1, error=RequestError("on purpose"))
        folds, floor = [0] * len(self.options.groups), self.options.floor(request.params)
        for index, block, start, end in self._places(item):
            group = self.options.groups[index]
            record = self._device.read(block, group.size(block.rung), request.params.cache_salt)
            require(record.count == end - start, f"{record.count} tokens lie where {end - start} should")
            require(max(record.path) <= max(0, group.floors[floor]), f"rungs {record.path} go below floor {floor}")
            require(record.value == truth.value_in(index, end - 1), f"{request.request_id} sees other KV than alone")
            if end > group.first_seen(item.end - 1):
                folds[index] = mix(folds[index], record.count, record.value)
            self._check_bank(request, record, end)
            if record.spoilt:
                require(block in self.unknown or request in self.tainted, "values known to be bad are read")
                self.tainted.add(request)
        fold = folds[0] if len(folds) == 1 else mix(*folds)
        require(fold == truth.fold(item.end), f"{request.request_id} sees other KV than alone")
        if not item.samples:
            return None
        if is_bad:
            self.tainted.add(request)
            self.spoil({block for block in self.simulation.blocks_of(request) if block.refs == 1})
        if request in self.tainted:
            return SampledToken(-1, error=RequestError("on purpose"))
        found = token(request.seed, item.end, fold)
        if item.end == len(truth.tokens):
            truth.tokens.append(found)
        return SampledToken(found)

    def _check_bank(self, request: Request, record: Record, end: int) -> None:
        """Checks that a sealed block, up to token ``end``, is under its request's bank, made of its own tokens."""
        if not self.options.has_bank or record.path[-1] <= 0:
            return
        bank, truth = self._record(self.simulation.tables_of(request)[0].slots[-1]), self.truths[request]
        require(record.mined == bank.mined, "a block was sealed under another bank")
        ends = [self.options.sink + i * self.options.block + count - 1 for i, (count, _) in enumerate(bank.mined)]
        require([value for _, value in bank.mined] == [truth.value(end) for end in ends], "a bank is of other tokens")
        windows = tuple(truth.value(e - 1) for e in self.options.window_ends(request.num_prefill_tokens, end))
        require(record.windows == windows, "a block was sealed under other windows' patterns")

    def _places(self, item: Any) -> Iterator[tuple[int, Any, int, int]]:
        """Places of tokens up to the item's end that its tokens see: group, block, and range of tokens in the block."""
        spans = self.truths[item.request].spans(item.end)
        for index, (group, table) in enumerate(
            zip(self.options.groups, self.simulation.tables_of(item.request), strict=True)
        ):
            first = group.first_seen(item.start)
            blocks: dict[int, Any] = {group.end(table.first + i): block for i, block in enumerate(table.blocks)}
            if group.sink and table.slots and table.slots[0].rung == -1:
                blocks[group.sink] = table.slots[0]
            for start, end in spans:
                if end > first:
                    full = group.end(group.blocks_for(end) - 1)
                    require(full in blocks, "a token sees a block that is gone")
                    yield index, blocks[full], start, end

    def _write(self, item: Any) -> None:
        truth, salt = self.truths[item.request], item.request.params.cache_salt
        for index, block, start, end in self._places(item):
            if end > item.start:
                nbytes, first = self.options.groups[index].size(block.rung), max(start, item.start)
                self._device.write(block, nbytes, first - start, end - start, truth.value_in(index, end - 1), salt)

    def _write_states(self, item: Any) -> None:
        """Has the states of a request, which must be those of its tokens before ``item``, go on behind it."""
        truth, salt = self.truths[item.request], item.request.params.cache_salt
        for index, slot in enumerate(self._states_of(item.request)):
            value = truth.state(index, item.start) if item.start else None
            if self._device.go_on(slot, item.start, item.end, value, truth.state(index, item.end), salt):
                self.tainted.add(item.request)

    def _states_of(self, request: Request) -> list[Any]:
        slots, place = self.options.state_slots, self.options.groups[0].place
        return [block for block in self.simulation.tables_of(request)[0].slots if place(block.rung)[0] in slots]

    def _spoil_states(self, batch: Any) -> None:
        """Has the states of requests that read bad values be bad, too."""
        for request in [item.request for item in batch.items if item.request in self.tainted]:
            for slot in self._states_of(request):
                self._device.spoil(slot)

    def check_spoilt(self) -> None:
        """Checks that only requests that are about to fail hold values known to be bad."""
        for request in self.simulation.scheduler.running:
            if request not in self.tainted:
                for block in self.simulation.blocks_of(request):
                    require(block in self.unknown or not self._record(block).spoilt, "bad values are kept")

    def check_cached(self) -> None:
        """Checks that cached blocks are full, and that none holds values known to be bad."""
        if self._space.prefix is None:
            return
        doubtful = self.unknown.union(*(self.simulation.blocks_of(request) for request in self.tainted))
        entries = self._space.prefix._entries
        for (key, _), block in self._space.cached.blocks().items():
            if self._device.host.is_fetched(block.slot.address):  # whoever reads it waits for that
                continue
            record = self._record(block)
            require(record.count == len(entries[key].tokens), "a cached block is not full")
            require(not record.spoilt or block in doubtful, "bad values are offered")
        for checkpoint in self._space.cached.checkpoints().values():
            is_spoilt = any(self._record(slot).spoilt for slot in checkpoint.slots)
            left = (self._space.states.left_by(request) for request in self.tainted)
            require(not is_spoilt or any(checkpoint in each for each in left), "bad states are offered")

    def _record(self, block: Any) -> Any:
        return self._device._at(block.slot.address, block.slot.nbytes)
