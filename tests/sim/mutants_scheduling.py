"""Bugs put into pressure and scheduler on purpose."""

from __future__ import annotations

from .patch import Patch

SCHEDULING = (
    Patch(
        "the hottest block steps down first",
        "coldest",
        "eligible",
        "newness = NEVER if own_rank is None else -age",
        "newness = NEVER if own_rank is None else min(1, age - 10 ** 9) if age >= 0 else 1",
    ),
    Patch(
        "blocks in the recent window step down",
        "coldest",
        "eligible",
        "return [c for c in found.values() if c.newness <= 0 or (even_recent and c.rung and (c.newness < NEVER))]",
        "return [c for c in found.values() if c.newness <= 10 ** 9 or (even_recent and c.rung and "
        "(c.newness < NEVER))]",
    ),
    Patch(
        "a shared block is named twice",
        "coldest",
        "eligible",
        "return [c for c in found.values() if c.newness <= 0 or (even_recent and c.rung and (c.newness < NEVER))]",
        "both = [c for c in found.values() if c.newness <= 0]\nreturn both + [c for c in both if c.shared][:1]",
    ),
    Patch(
        "shared blocks are never looked at",
        "coldest",
        "Coldest.take",
        "self._followers is not None and len(self._heap) < number",
        "False",
    ),
    Patch(
        "a block that others share goes as if it were one's own",
        "group",
        "GroupTables.coldest",
        "block.rung < (block.floor if found is None else found[0].rung) and len(block.holders) == 1",
        "block.rung < (block.floor if found is None else found[0].rung)",
    ),
    Patch(
        "cached blocks are given up last",
        "pressure",
        "Pressure.stretch",
        "while room < num_tokens and self._yield_idle(self.space.shortage(request, num_tokens, spare)):\n"
        "    room = self.space.room_for(request, num_tokens, spare)",
        "",
    ),
    Patch(
        "there is no relief", "pressure", "Pressure._relieve", "self.space.num_rungs == 1", "self.space.num_rungs < 9"
    ),
    Patch(
        "it looks ahead for all who run",
        "pressure",
        "Pressure._look_ahead",
        "wanted = self.space.num_growing(self.running, self._ahead_steps)",
        "wanted = len(self.running)",
    ),
    Patch(
        "it looks a step further ahead",
        "pressure",
        "Pressure._look_ahead",
        "wanted = self.space.num_growing(self.running, self._ahead_steps)",
        "wanted = self.space.num_growing(self.running, self._ahead_steps + 1)",
    ),
    Patch(
        "it looks ahead for who will have ended",
        "manager",
        "KVManager.num_growing",
        "min(r.num_computed_tokens + num_tokens, r.max_num_tokens)",
        "r.num_computed_tokens + num_tokens",
    ),
    Patch(
        "it looks ahead for prompts",
        "manager",
        "KVManager.num_growing",
        "r.num_reserved_tokens < min(r.num_computed_tokens + num_tokens, r.max_num_tokens) and "
        "r.num_tokens - r.num_computed_tokens <= 1",
        "r.num_reserved_tokens < min(r.num_computed_tokens + num_tokens, r.max_num_tokens)",
    ),
    Patch(
        "it looks ahead although there is room",
        "pressure",
        "Pressure._look_ahead",
        "self.space.has_blocks(wanted)",
        "False",
    ),
    Patch(
        "as many as may step down at once always do",
        "coldest",
        "Coldest.take",
        "if is_enough(chosen[-1]):\n    break",
        "",
    ),
    Patch(
        "one block more than is needed steps down",
        "coldest",
        "Coldest.take",
        "is_enough(chosen[-1])",
        "len(chosen) > 1 and is_enough(chosen[-2])",
    ),
    Patch(
        "what a block leaves is not counted in",
        "shortage",
        "Shortage.eased",
        "self._extra[sizes[old]] -= number",
        "",
    ),
    Patch(
        "what a block takes on its new rung is not counted in",
        "shortage",
        "Shortage.eased",
        "self._extra[sizes[new]] += number",
        "",
    ),
    Patch(
        "what was found for one step serves the next",
        "pressure",
        "Pressure.begin_step",
        "self.forget()",
        "",
    ),
    Patch("all of memory steps down at once", "pressure", "", "RELIEF_BLOCKS = 8", "RELIEF_BLOCKS = 800"),
    Patch(
        "eager blocks step down during the prompt",
        "pressure",
        "Pressure._settle",
        "ready = [r for r in self.space.aged(self.running) if r.num_computed_tokens >= r.num_prefill_tokens]",
        "ready = self.space.aged(self.running)",
    ),
    Patch("quotas protect nobody", "pressure", "Pressure._ranks", "name == tenant or name in over", "True"),
    Patch("who lacks a block is asked once for all", "pressure", "Pressure.begin_step", "self._lacking = None", ""),
    Patch(
        "who got a block is thought to lack it",
        "pressure",
        "Pressure._reserve",
        "done and self._lacking is not None and (num_tokens > request.num_computed_tokens)",
        "False",
    ),
    Patch(
        "the first gives way",
        "scheduler",
        "Scheduler._make_room",
        "victim = self.running.last",
        "victim = self.running.first",
    ),
    Patch(
        "what can never fit is taken",
        "scheduler",
        "Scheduler.add",
        "request.max_num_tokens > capacity",
        "request.max_num_tokens > 2 * capacity",
    ),
    Patch("the budget is not counted down", "scheduler", "Scheduler.schedule", "budget -= num_tokens", ""),
    Patch("a preempted request keeps its blocks", "scheduler", "Scheduler._park", "self.space.release(request)", ""),
    Patch("a preempted request is lost", "scheduler", "Scheduler._park", "self.waiting.add(request)", ""),
    Patch(
        "a preempted request is thought computed",
        "scheduler",
        "Scheduler._park",
        "request.num_computed_tokens = 0",
        "",
    ),
    Patch(
        "a tenant over its quota stays so",
        "scheduler",
        "Scheduler.finish",
        "self._over_quota.discard(request.params.tenant)",
        "",
    ),
    Patch(
        "an abort leaks the blocks",
        "scheduler",
        "Scheduler.finish",
        "if error is None:\n    self.space.release(request)\nelse:\n    self.space.discard(request)",
        "if reason is FinishReason.ABORT:\n"
        "    pass\n"
        "elif error is None:\n"
        "    self.space.release(request)\n"
        "else:\n"
        "    self.space.discard(request)",
    ),
    Patch(
        "a failed request is released as a good one",
        "scheduler",
        "Scheduler.finish",
        "self.space.discard(request)",
        "self.space.release(request)",
    ),
    Patch(
        "recovery forgets who ran",
        "scheduler",
        "Scheduler.recover",
        "request.status, request.num_computed_tokens = (RequestStatus.WAITING, 0)",
        "",
    ),
    Patch(
        "the number of running requests is not bounded",
        "scheduler",
        "Scheduler._admit",
        "not budget or len(self.running) == self.max_num_seqs",
        "not budget",
    ),
    Patch(
        "one token too many counts as computed",
        "scheduler",
        "Scheduler.schedule",
        "request.num_computed_tokens = item.end",
        "request.num_computed_tokens = min(item.end + 1, request.num_tokens)",
    ),
    Patch(
        "a sampled token does not count before it is known",
        "scheduler",
        "Scheduler.schedule",
        "request.num_tokens += 1",
        "pass",
    ),
    Patch(
        "the last token is followed by another",
        "scheduler",
        "Scheduler.schedule",
        "request.needs_tokens or target > request.max_num_tokens",
        "request.needs_tokens",
    ),
    Patch(
        "nobody waits for the host to see a token",
        "scheduler",
        "Scheduler.schedule",
        "request.needs_tokens or target > request.max_num_tokens",
        "target > request.max_num_tokens",
    ),
    Patch(
        "recovery counts tokens in flight",
        "scheduler",
        "Scheduler.recover",
        "request.num_tokens = len(request.token_ids)",
        "",
    ),
    Patch(
        "blocks a preempted request had are filed",
        "scheduler",
        "Scheduler.computed",
        "request.next_cacheable_at <= item.end <= request.num_computed_tokens",
        "True",
    ),
    Patch(
        "blocks are filed before their last token is known",
        "scheduler",
        "Scheduler.computed",
        "self.space.computed(request, item.end)",
        "self.space.computed(request, request.num_computed_tokens)",
    ),
)
