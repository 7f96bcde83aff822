"""The scheduler under any order of calls hypothesis can think of: submit, step, abort, fail, recover."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qkv_engine.errors import CapacityError, RequestError
from qkv_engine.kv.spec import RungSize
from qkv_engine.request import FinishReason, Request, RequestStatus

from .common import BLOCK, RUNGS, make_request, make_scheduler, make_space, make_spec, run

ODD = tuple(RungSize(f"r{size}", size, 16.0) for size in (16, 9, 5))


class SchedulerMachine(RuleBasedStateMachine):
    """A model that knows who was submitted and who ended; everything else is asked of the books."""

    @initialize(
        eager=st.booleans(),
        sink=st.sampled_from((0, 32)),
        odd=st.booleans(),
        prefix=st.booleans(),
        slabs=st.integers(5, 9),
    )
    def start(self, eager: bool, sink: int, odd: bool, prefix: bool, slabs: int) -> None:
        rungs = ODD if odd else RUNGS
        self.ladder = make_spec(rungs, sink=sink, recent=50 * eager, eager=eager, sink_nbytes=4 * bool(sink))
        self.options = {"slab_blocks": 2, "prefix": prefix}
        self.blocks = 2 * slabs
        self.scheduler = make_scheduler(self.blocks, self.ladder, seqs=4, budget=300, **self.options)
        self.live: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.serial = 0

    @rule(
        blocks=st.floats(0.01, 6),
        family=st.integers(0, 2),
        max_tokens=st.integers(1, 80),
        floor=st.sampled_from((2, 0, 1)),
    )
    def submit(self, blocks: float, family: int, max_tokens: int, floor: int) -> None:
        name, self.serial = f"r{self.serial}", self.serial + 1
        request = make_request(name, [family] * max(1, int(blocks * BLOCK)), max_tokens, floor=floor)
        fits = request.max_num_tokens <= self.scheduler.space.capacity(request)
        try:
            self.scheduler.add(request)
        except CapacityError:
            assert not fits
            return
        assert fits
        self.live[name] = request

    @precondition(lambda self: self.live)
    @rule()
    def submit_a_live_id(self) -> None:
        name = next(iter(self.live))
        try:
            self.scheduler.add(make_request(name, 3))
        except RequestError:
            return
        raise AssertionError("a live id was taken twice")

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 30))
    def steps(self, times: int) -> None:
        for _ in range(times):
            if not self.live:
                return
            batch = self.scheduler.schedule()
            assert 0 < batch.num_tokens <= 300
            assert self.scheduler.running.first in [item.request for item in batch.items]
            run(self.scheduler, batch)
            self._collect()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from((FinishReason.ABORT, FinishReason.ERROR)))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        error = RequestError("on purpose") if reason is FinishReason.ERROR else None
        self.scheduler.finish(request, reason, error=error)
        self._collect()

    @rule()
    def recover(self) -> None:
        self.scheduler.recover(make_space(self.blocks, self.ladder, **self.options))

    def _collect(self) -> None:
        for name, request in list(self.live.items()):
            if request.is_finished:
                self.ended.append(self.live.pop(name))

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.requests == self.live
        assert {*scheduler.running, *scheduler.waiting} == set(self.live.values())
        assert set(scheduler.space.tables.main._tables) == {r.request_id for r in scheduler.running}
        assert all(r.status is RequestStatus.WAITING and not r.num_computed_tokens for r in scheduler.waiting)
        assert scheduler.num_preemptions == 0  # all name their max_tokens, so admission saw what they need
        assert all(r.num_output_tokens <= r.max_tokens for r in self.ended)
        scheduler.space.tables.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bound = sum(request.max_num_tokens + 1 for request in self.live.values())
        while self.live:
            bound -= 1
            assert bound >= 0
            self.steps(1)
        if self.scheduler.space.prefix is not None:
            self.scheduler.space.prefix.clear()
        assert self.scheduler.space.tables.arena.used_nbytes == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
