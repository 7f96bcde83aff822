"""Bugs put into pressure and scheduler on purpose."""

from __future__ import annotations

from .code import Patch

SCHEDULING = (
    Patch(
        "the hottest block steps down first",
        "coldest",
        "newness = NEVER if payer is None else -age",
        "newness = NEVER if payer is None else min(1, age - 10**9) if age >= 0 else 1",
    ),
    Patch(
        "blocks in the recent window step down",
        "coldest",
        "if c.newness <= 0 or",
        "if c.newness <= 10**9 or",
    ),
    Patch(
        "a shared block is named twice",
        "coldest",
        "    return [c for c in found.values() if c.newness <= 0 or (even_recent and c.rung and c.newness < NEVER)]",
        "    both = [c for c in found.values() if c.newness <= 0]\n    return both + [c for c in both if c.shared][:1]",
    ),
    Patch(
        "shared blocks are never looked at",
        "coldest",
        "        if self._followers is not None and len(self._heap) < number:\n",
        "        if False:\n",
    ),
    Patch(
        "a block that others share goes as if it were one's own",
        "table",
        " and len(block.holders) == 1:",
        ":",
    ),
    Patch(
        "cached blocks are given up last",
        "pressure",
        "        if self.space.evict():\n            return True\n"
        "        if self.space.num_rungs == 1:\n            return False\n",
        "        if self.space.num_rungs == 1:\n            return self.space.evict()\n",
    ),
    Patch(
        "there is no relief",
        "pressure",
        "        if self.space.num_rungs == 1:\n            return False\n",
        "        if self.space.num_rungs < 9:\n            return False\n",
    ),
    Patch(
        "it looks ahead for all who run",
        "pressure",
        "wanted = self.space.num_growing(self.running, self._ahead_steps)",
        "wanted = len(self.running)",
    ),
    Patch(
        "it looks a step further ahead",
        "pressure",
        "wanted = self.space.num_growing(self.running, self._ahead_steps)",
        "wanted = self.space.num_growing(self.running, self._ahead_steps + 1)",
    ),
    Patch(
        "it looks ahead for who will have ended",
        "manager",
        "            r.num_reserved_tokens < min(r.num_computed_tokens + num_tokens, r.max_num_tokens)\n",
        "            r.num_reserved_tokens < r.num_computed_tokens + num_tokens\n",
    ),
    Patch(
        "it looks ahead for prompts",
        "manager",
        "            and r.num_tokens - r.num_computed_tokens <= 1\n",
        "",
    ),
    Patch(
        "it looks ahead although there is room",
        "pressure",
        "        if free < wanted:\n            self._step_down",
        "        if True:\n            self._step_down",
    ),
    Patch(
        "as many as may step down at once always do",
        "coldest",
        "            if is_enough(chosen[-1]):\n                break\n",
        "",
    ),
    Patch(
        "one block more than is needed steps down",
        "coldest",
        "            if is_enough(chosen[-1]):\n                break\n",
        "            if len(chosen) > 1 and is_enough(chosen[-2]):\n                break\n",
    ),
    Patch(
        "what a block leaves is not counted in",
        "shortage",
        "        self._extra[self._tables.sizes[old]] -= 1\n",
        "",
    ),
    Patch(
        "what a block takes on its new rung is not counted in",
        "shortage",
        "        self._extra[self._tables.sizes[new]] += 1\n",
        "",
    ),
    Patch(
        "what was found for one step serves the next",
        "pressure",
        '"""Drops the findings of the last step; then steps blocks down for an eager ladder or the near future."""\n'
        "        self.forget()",
        '"""Forgets nothing."""',
    ),
    Patch("all of memory steps down at once", "pressure", "RELIEF_BLOCKS = 8", "RELIEF_BLOCKS = 800"),
    Patch(
        "eager blocks step down during the prompt",
        "pressure",
        "ready = [r for r in self.space.aged(self.running) if r.num_computed_tokens >= r.num_prefill_tokens]",
        "ready = self.space.aged(self.running)",
    ),
    Patch(
        "quotas protect nobody",
        "pressure",
        "            if name == tenant or name in over:\n",
        "            if True:\n",
    ),
    Patch(
        "who lacks a block is asked once for all",
        "pressure",
        "        self.forget()\n        self._lacking = None\n",
        "        self.forget()\n",
    ),
    Patch(
        "who got a block is thought to lack it",
        "pressure",
        "        if done and self._lacking is not None and num_tokens > request.num_computed_tokens:",
        "        if False:",
    ),
    Patch("the first gives way", "scheduler", "victim = self.running.last", "victim = self.running.first"),
    Patch(
        "what can never fit is taken",
        "scheduler",
        "        if request.max_num_tokens > capacity:",
        "        if request.max_num_tokens > 2 * capacity:",
    ),
    Patch(
        "the budget is not counted down",
        "scheduler",
        "                budget -= num_tokens\n",
        "",
    ),
    Patch(
        "a preempted request keeps its blocks",
        "scheduler",
        "        free = self.space.free_blocks()\n"
        "        self.running.remove(request)\n"
        "        self.space.release(request)",
        "        free = self.space.free_blocks()\n        self.running.remove(request)",
    ),
    Patch(
        "a preempted request is lost",
        "scheduler",
        "        self.num_preemptions += 1\n        self.waiting.add(request)",
        "        self.num_preemptions += 1",
    ),
    Patch(
        "a preempted request is thought computed",
        "scheduler",
        "        request.num_computed_tokens = 0\n        request.num_preemptions += 1",
        "        request.num_preemptions += 1",
    ),
    Patch(
        "a tenant over its quota stays so",
        "scheduler",
        "        self._over_quota.discard(request.params.tenant)\n        queue.remove(request)",
        "        queue.remove(request)",
    ),
    Patch(
        "an abort leaks the blocks",
        "scheduler",
        "        if error is None:\n            self.space.release(request)",
        "        if reason is FinishReason.ABORT:\n            pass\n"
        "        elif error is None:\n            self.space.release(request)",
    ),
    Patch(
        "a failed request is released as a good one",
        "scheduler",
        "            self.space.discard(request)",
        "            self.space.release(request)",
    ),
    Patch(
        "recovery forgets who ran",
        "scheduler",
        "                request.status, request.num_computed_tokens = RequestStatus.WAITING, 0\n",
        "",
    ),
    Patch(
        "the number of running requests is not bounded",
        "scheduler",
        "            if not budget or len(self.running) == self.max_num_seqs:",
        "            if not budget:",
    ),
    Patch(
        "one token too many counts as computed",
        "scheduler",
        "            request.num_computed_tokens = item.end\n",
        "            request.num_computed_tokens = min(item.end + 1, request.num_tokens)\n",
    ),
    Patch(
        "a sampled token does not count before it is known",
        "scheduler",
        "                request.num_tokens += 1\n",
        "                pass\n",
    ),
    Patch(
        "the last token is followed by another",
        "scheduler",
        "(request.needs_tokens or target > request.max_num_tokens)",
        "request.needs_tokens",
    ),
    Patch(
        "nobody waits for the host to see a token",
        "scheduler",
        "(request.needs_tokens or target > request.max_num_tokens)",
        "target > request.max_num_tokens",
    ),
    Patch(
        "recovery counts tokens in flight",
        "scheduler",
        "                request.num_tokens = len(request.token_ids)\n",
        "",
    ),
    Patch(
        "blocks a preempted request had are filed",
        "scheduler",
        "        if request.next_cacheable_at <= item.end <= request.num_computed_tokens:  # not preempted since\n",
        "        if True:\n",
    ),
    Patch(
        "blocks are filed before their last token is known",
        "scheduler",
        "self.space.computed(request, item.end)",
        "self.space.computed(request, request.num_computed_tokens)",
    ),
)
