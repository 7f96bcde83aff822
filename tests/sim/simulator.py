"""The real engine core, scheduler, pressure, tables, prefix cache and arena on a fake device, one seed a run.

First arrivals, aborts, forks and faults come at random; then no more, and all requests have to finish within a bound on
steps by their tokens left. After every event everything is checked: see ``invariants``, ``spy`` and ``device``.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from qkv_engine.errors import CapacityError, RequestError
from qkv_engine.request import FinishReason, Request, SamplingParams

from ..scheduler.common import FixedPace
from .broken import Broken, require
from .code import Code, load
from .core_checks import check_answer, check_core
from .device import Device, mix
from .disk import SLOW, FakeDisk, bad_sources, check_disk
from .doubts import spoil_running, spoil_unseen, take_sealed_bad
from .hinted import end_session, timed_hints
from .host import Host
from .invariants import check_batch, check_books, check_queues, check_room
from .model import Fault, Model
from .options import OPEN_END_BLOCKS, Options, draw
from .patch import Patch
from .requests import Requests
from .resizes import Resizes
from .spy import SpySpace
from .stand_ins import SimulatedRunner, spy_scheduler
from .tier import check_copies, note_fetched, spoil_moved
from .truth import Truth

STOP_TOKEN = 0


class OutOfEvents(BaseException):
    """A run was longer than ``limit`` events."""


class BrokenOff(BaseException):
    """A step is interrupted, as by ``KeyboardInterrupt``."""


class Simulation:
    """One simulated run."""

    def __init__(self, options: Options, patch: Patch | None = None):
        self.options = options
        self.code: Code = load(patch)
        self.rng = random.Random(mix(options.seed, 17))
        self.num_events = 0
        self.limit = 10**9
        self.counts: Counter[str] = Counter()
        self.outputs: dict[str, tuple[list[int], str]] = {}  # of requests that ended
        self.usage: dict[str, dict[str, int]] = {}  # their blocks by rung
        self.ended_requests: list[Request] = []
        self.submissions: dict[str, Any] = {}
        self.is_calm = self.in_step = False
        self._log = hashlib.sha256()
        self._requests, self._resizes = Requests(options, self.rng), Resizes(self)
        self.model = Model(self)
        self.disk = FakeDisk(self) if options.has_disk else None
        self.space: SpySpace = self._new_space(self._new_tables())
        self.scheduler: Any = spy_scheduler(self, self.code.Scheduler)(
            self.space,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.budget,
            pace=None if options.chunk_tokens is None else FixedPace(options.chunk_tokens),
            takes_turns=options.takes_turns,
        )
        self.space.scheduler = self.scheduler
        self.core: Any = self.code.EngineCore(
            self.scheduler,
            SimulatedRunner(self),
            None,
            frozenset({STOP_TOKEN}),
            self._renew_space,
            runs_ahead=options.ahead,
        )

    def _new_tables(self) -> Any:
        options, code = self.options, self.code
        block, slab, chunk = options.block_nbytes, options.slab_nbytes, options.chunk_nbytes
        reserve = code.reserve.reserve_nbytes(options.chain_sizes, block, slab)
        arena = code.Arena(options.nbytes, slab, reserve, block_nbytes=block, chunk_nbytes=chunk)
        return code.BlockTables(arena, options.spec(code.spec))

    def _new_space(self, tables: Any) -> SpySpace:
        options, code = self.options, self.code
        has_tier = options.prefix and options.host_nbytes
        tier = code.HostTier(tables.spec, options.host_nbytes, options.slab_nbytes) if has_tier else None
        if self.disk is not None:
            self.disk.settle()
        given = tables, "model", tier, self.disk
        more = {"hints": timed_hints(self, tables, tier), "quota": options.quota}
        prefix = code.PrefixCache(*given, **more) if options.prefix else None
        host = Host(options.host_nbytes, mix(options.seed, self.num_events))
        self.device = Device(options.nbytes, options.groups, options.has_bank, host)
        self.seen: dict[Any, Any] = {}
        space = code.KVManager(tables, prefix, options.quota, open_end_blocks=OPEN_END_BLOCKS)
        return SpySpace(space, options, code)

    def _renew_space(self) -> SpySpace:
        """Makes new books over the old bytes."""
        device, asked = self.device, self.space.size_asked
        self.space = self._new_space(self.space.tables.renewed())
        self.space.size_asked = asked
        self.device._starts, self.device._records, self.device.hole = device._starts, device._records, device.hole
        self.space.scheduler = self.scheduler
        return self.space

    # ---- running

    def run(self, num_events: int) -> None:
        """Runs at least ``num_events`` events of chaos, then lets all requests finish."""
        while self.num_events < num_events:
            self._chaos()
            self.step()
        self.finish_all()

    def finish_all(self) -> None:
        """Lets all finish, in a step for each token left (two when running ahead), and checks that nothing is left."""
        self.is_calm = True
        self.model.begin_calm()
        self._finish()
        if self.options.resizes:  # when nobody is there
            self._resizes.ask(self.options.nbytes // 2)
            self._finish()
        if self.space.prefix is not None:
            self.space.prefix.clear()
        self.event("end")
        require(self.space.tables.arena.used_nbytes == 0, "bytes are left when nobody is")
        require(not self.space.tables.arena._slabs, "slabs are left when nobody is")
        require(self.space.tables.arena._gap == self.space.tables.arena.nbytes, "places are left when nobody is")
        require(not self.core.resizer.is_pending, "a shrink never ends")
        require(not self.model.truths and not self.core.live, "a request never ended")
        for name, submission in self.submissions.items():
            check_answer(self, name, submission.stream.get(0))

    def _finish(self) -> None:
        """Takes steps until there is no work."""
        bound = sum(min(r.max_num_tokens, r.num_tokens + 4096) + 1 for r in self.scheduler.requests.values())
        bound = 2 * bound + 2 if self.options.ahead else bound
        if self.options.host_nbytes:  # each may wait for what it lacks, a piece a step
            bound = 4 * bound + 8
        if self.disk is not None:
            bound = 8 * (bound + 8 * SLOW)
        if self.core.resizer.is_pending:  # cached blocks step down rung by rung, and are given up
            rungs = max(map(len, self.options.chain_sizes)) * max(1, self.options.num_states)
            bound += (rungs + 1) * len(self.space.cached.places()) + self.options.slabs
        while self.core.has_work:
            require(bound > 0, "requests do not finish")
            bound -= 1
            self.step()

    def digest(self) -> str:
        return self._log.hexdigest()

    def event(self, *what: Any) -> None:
        """Notes an event and checks everything."""
        if self.num_events >= self.limit:
            raise OutOfEvents
        self.num_events += 1
        self.counts[what[0]] += 1
        self._log.update(repr(what).encode())
        self.seen = check_books(self.space, self.seen)
        check_room(self.space)
        check_queues(self.scheduler, self.space)
        self.space.hinted.check()
        if self.options.promises_no_preemption:
            require(self.scheduler.num_preemptions == 0, "an admitted request was preempted")
        self.may_break_off()

    def may_break_off(self) -> None:
        if self.in_step and self.rng.random() < self.options.recoveries:
            raise BrokenOff

    # ---- chaos

    def _chaos(self) -> None:
        options, rng = self.options, self.rng
        crowded = len(self.scheduler.waiting) >= options.crowd
        if not self.scheduler.has_work or (not crowded and rng.random() < options.arrivals):
            copies = rng.randint(2, 4) if rng.random() < options.forks else 1
            drawn, name = self._requests, f"r{self.counts['add']}"
            ids, params, length = drawn.prompt(), drawn.params(), drawn.length()
            if self.scheduler.running and rng.random() < options.forks:  # the prompt is another request's tokens
                parent = rng.choice(list(self.scheduler.running))
                ids, params = list(parent.token_ids), replace(params, cache_salt=parent.params.cache_salt)
            if options.returns and self.ended_requests and rng.random() < options.returns:
                earlier = rng.choice(self.ended_requests[-8:])
                ids = earlier.token_ids + ids[: rng.randint(1, options.block)]
                params = replace(params, cache_salt=earlier.params.cache_salt)
            if rng.random() < 0.8:  # mostly requests that fit
                ids = ids[: max(1, self.space.capacity_of(params) - length)]
            if options.hints and rng.random() < options.hints:
                retain = rng.choice((None, 0.0, 10.0, 100.0, 1000.0))
                params = replace(params, retain=retain, session=rng.choice(("", "a", "b", "c")))
            if options.scored and rng.random() < options.scored:
                params = replace(params, num_prefill_tokens=rng.randint(1, len(ids)))
            for index in range(copies):
                self.submit(f"{name}/{index}", ids, params, length, rng.randrange(2**32))
        if self.scheduler.requests and rng.random() < options.aborts:
            self.abort(rng.choice(list(self.scheduler.requests.values())))
        if rng.random() < options.recoveries:
            self.recover()
        end_session(self)
        if options.resizes and rng.random() < options.resizes:
            self._resizes.ask(rng.randint(0, options.nbytes + options.nbytes // 8))

    def submit(self, name: str, ids: list[int], params: SamplingParams, length: int, seed: int) -> None:
        """Submits a request; without ``max_tokens`` it may go on as long as it fits."""
        fits = self.space.capacity_of(params)
        if params.max_tokens is None:
            length = max(1, fits - len(ids) + 1)
        floor = self.options.floor(params)
        submission = self.code.Submission(name, None, ids, params, length, seed, [], bool(seed % 2), floor=floor)
        self.core.live[name] = submission
        self.core.add(submission)
        self._note_submission(submission)

    def _note_submission(self, submission: Any) -> None:
        request = submission.completions[0].request
        fits = self.space.capacity_of(request.params)
        if submission.error is not None:
            require(isinstance(submission.error, CapacityError), "a request was refused for nothing")
            require(request.max_num_tokens > fits, "a request that fits was refused")
            self.event("refused", request.request_id)
            return
        require(request.max_num_tokens <= fits, "a request that cannot fit was taken")
        self.submissions[request.request_id] = submission
        self.model.begin(request)
        self.event("add", request.request_id, request.num_prompt_tokens, request.max_tokens)
        try:
            self.scheduler.add(Request(request.request_id, [1], request.params, 1, floor=request.floor))
        except RequestError:
            return
        require(False, "a live id was taken twice")

    def abort(self, request: Request) -> None:
        self.core.abort(request.request_id)
        require(request.finish_reason is FinishReason.ABORT, "an aborted request goes on")

    def recover(self) -> None:
        """Recovers as after an interrupt: new books, the old bytes and requests."""
        self.in_step = False
        self.model.forget_bad()
        self.model.unknown |= bad_sources(self.disk)
        held = [r for r in self.model.truths if any(block.rung >= 0 for block in self.blocks_of(r))]
        self.core.recover()
        for request in [request for request in self.model.truths if request.is_finished]:
            self._note_end(request)
        for request in held:
            require(not request.is_finished or bool(self._kv(request)), "it is unknown where a request's blocks stood")
        check_core(self)
        self.event("recover")

    def _kv(self, request: Request) -> dict[str, int]:
        return self.submissions[request.request_id].completions[0].kv.blocks

    # ---- a step

    def step(self) -> None:
        if self.disk is not None:
            self.disk.poll()
        if self.core.has_work:
            self.in_step = not self.is_calm
            self.device.runs_again = False
            try:
                self.core.step()
            except (BrokenOff, Fault) as error:
                alone = not self.options.ahead or self.core.registry.suspects
                is_expected = isinstance(error, BrokenOff) or self.model.forgives_states()
                require(is_expected or not alone, "a fault is not narrowed down")
                self.recover()
            finally:
                self.in_step = False
            check_core(self)
            self._resizes.check()
            store = self.space.tables.store
            if not store.waves and not store.holes:  # moves of an empty batch wait for the next one
                self.model.check_spoilt()
                self.model.check_cached()
                check_copies(self)
            check_disk(self)

    def before_schedule(self) -> None:
        running = self.scheduler.running
        self._had = set(running)
        self._first = (running.first, running.first.num_preemptions) if running else None
        self.space.begin_schedule()

    def scheduled(self, batch: Any) -> None:
        self.space.check_relieved()
        self.counts["hit"] += sum(item.start == item.request.num_cached_tokens > 0 for item in batch.items)
        self.event("schedule", [(i.request.request_id, i.start, i.num_tokens) for i in batch.items])
        ahead = bool(self.core._in_flight)
        require(ahead <= self.options.ahead, "a step runs ahead that must not")
        self.counts["ahead"] += check_batch(batch, self.scheduler, self.space, ahead)
        self.counts["trim"] += self.space.num_trims
        self.counts["idle"] += self.space.num_idle_demotions
        self.counts["replaced"] += self.space.cached.num_replaced
        self.space.num_trims = self.space.num_idle_demotions = self.space.cached.num_replaced = 0
        self.counts.update(self.space.hosted.take_counts())
        self.counts.update(self.space.states.take_counts())
        first, rounds = self._first or (None, 0)
        require(first is None or first.num_preemptions == rounds, "the first was preempted")
        self.counts["preempted"] += sum(r not in self.scheduler.running for r in self._had)

    def apply_moves(self) -> set[Any]:
        """Applies moves like the cache before a step; returns blocks whose values turned out bad."""
        if self.rng.random() < self.options.evacuations:
            while self.space.tables.store._evacuate():
                self.event("evacuate")
        bad = spoil_moved(self)
        moves = self.device.apply(self.space.tables.store)
        note_fetched(self)
        spoil_unseen(self)
        self.counts["demotion"] += sum(move.old != move.new for move in moves)
        self.counts["copy"] += sum(move.old == move.new for move in moves)
        self.counts["mined"] += sum(move.mining is not None for move in moves)
        self.event("apply", [(m.src, m.dst, m.old, m.new) for m in moves])
        bad |= spoil_running(self)
        return bad | take_sealed_bad(self)

    def about_to_emit(self, request: Request) -> None:
        """Notes the next token of ``request``, all of whose tokens are computed; the core need not report it."""
        self.event("computed", request.request_id, len(request.token_ids))
        self.may_break_off()

    def emitted(self, request: Request, token_id: int) -> None:
        truth = self.model.truths[request]
        truth.emitted = (*truth.emitted, token_id)
        self.event("token", request.request_id, token_id)

    # ---- ends

    def tables_of(self, request: Request) -> list[Any]:
        """The tables of a request by group; none if it does not run."""
        return self.space.holdings.tables_of(request) if request.request_id in self.space.tables else []

    def blocks_of(self, request: Request) -> list[Any]:
        return [block for table in self.tables_of(request) for block in table]

    def ended(self, request: Request, reason: FinishReason, tables: list[Any]) -> None:
        """Checks the end of a request that had these tables."""
        blocks = [block for table in tables for block in table]
        require(request.is_finished and request.finish_reason is reason, "a request did not end as told")
        require(not self.blocks_of(request), "an ended request owns blocks")
        purpose = ("on purpose", "not finite")
        require(request.error is None or any(word in str(request.error) for word in purpose), repr(request.error))
        require("Fault" not in str(request.error) or request in self.model.doomed, "a request fails for another one")
        if request.error is not None:
            self.model.unknown -= {block for block in blocks if not block.holders}
        if request.error is not None and self.space.prefix is not None:
            offered = {id(block) for block in self.space.cached.blocks().values()}
            require(not any(id(block) in offered for block in blocks), "blocks of a failed request are offered")
        if blocks:
            rungs: Counter[str] = Counter()
            for index, (group, table) in enumerate(zip(self.options.groups, tables, strict=True)):
                held = max(0, group.blocks_for(len(request.token_ids) - 1) - table.first)
                names = self.options.rung_names(index)
                rungs.update(names[block.rung] for block in table.blocks[:held])
            self.usage[request.request_id] = dict(rungs)
        self._note_end(request)
        self.event("end of", request.request_id, str(reason))

    def _note_end(self, request: Request) -> None:
        truth = self.model.truths.pop(request)
        require(request.request_id not in self.outputs, "a request ended twice")
        twin = Request("", request.prompt_token_ids, request.params, 1, floor=request.floor, seed=request.seed)
        alone = Truth(twin, truth.groups)
        for found in request.output_token_ids:
            require(found == alone.next_token(len(alone.tokens)), "an answer differs from the one given alone")
            alone.tokens.append(found)
        require(request.num_output_tokens <= request.max_tokens, "more tokens than asked for")
        require(request.token_ids == [*request.prompt_token_ids, *truth.emitted], "tokens are lost or doubled")
        if not request.params.ignore_eos:
            require(STOP_TOKEN not in request.output_token_ids[:-1], "a request went on after its stop")
        self.outputs[request.request_id] = (request.output_token_ids, str(request.finish_reason))
        self.ended_requests.append(request)


def simulate(seed: int, num_events: int, change: Callable[[Options], Options] | None = None) -> Simulation:
    """One run with the options that ``seed`` draws."""
    options = draw(seed) if change is None else change(draw(seed))
    simulation = Simulation(options)
    try:
        simulation.run(num_events)
    except (Exception, Broken) as error:
        error.add_note(f"after {simulation.num_events} events of {options}")
        raise
    return simulation
