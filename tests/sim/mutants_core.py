"""Bugs put into the engine's core on purpose."""

from __future__ import annotations

from .code import Patch

CORE = (
    Patch(
        "recovery does not look for stops",
        "registry",
        "            reason = completion.read()\n            if",
        "            reason, completion.num_read = None, completion.request.num_output_tokens\n            if",
    ),
    Patch(
        "recovery forgets where blocks stood",
        "recovery",
        "            for completion in submission.completions:\n                registry.note_usage(completion)\n",
        "            pass\n",
    ),
    Patch(
        "recovery keeps the times of lost tokens",
        "registry",
        "                del times[completion.request.num_output_tokens :]\n",
        "                pass\n",
    ),
    Patch(
        "recovery reports no end",
        "registry",
        "        elif submission.finished:\n            self.report(submission)\n",
        "",
    ),
    Patch(
        "an ended request is remembered",
        "registry",
        "        self.rows.pop(completion.request, None)\n",
        "",
    ),
    Patch(
        "a refused request is remembered",
        "registry",
        "            request.status = FINISHED\n        self._close(completion)\n",
        "            request.status = FINISHED\n            return\n        self._close(completion)\n",
    ),
    Patch(
        "one failure takes the batch along",
        "recovery",
        "        if len(batch) > 1 or ",
        "        if False and ",
    ),
    Patch(
        "holders of bad values go on",
        "recovery",
        "            if not (request.is_finished or bad.isdisjoint(registry.space.tables[request.request_id])):\n",
        "            if False:\n",
    ),
    Patch(
        "a request stops a token late",
        "submission",
        "FinishReason.LENGTH if self.num_read >= request.max_tokens",
        "FinishReason.LENGTH if self.num_read > request.max_tokens",
    ),
    Patch(
        "ends of sequence are ignored",
        "submission",
        "        own = () if self.params.ignore_eos else eos_ids\n",
        "        own: tuple[int, ...] = ()\n",
    ),
    Patch(
        "recovery keeps steps under way",
        "core",
        "        self._in_flight.clear()\n        return self.recovery",
        "        return self.recovery",
    ),
    Patch(
        "what follows a step that broke off is kept",
        "core",
        "            if is_followed:\n                raise",
        "            if False:\n                raise",
    ),
    Patch(
        "an ended request is given another token",
        "core",
        "            if request.status is FINISHED:\n                continue",
        "            if False:\n                continue",
    ),
    Patch(
        "two steps run ahead",
        "core",
        "        while len(self._in_flight) > may_run_ahead:\n",
        "        while len(self._in_flight) > 2 * may_run_ahead:\n",
    ),
    Patch(
        "nobody waits for the last step",
        "core",
        "        if not batch.items:\n            return False\n",
        "        if not batch.items:\n            return True\n",
    ),
    Patch(
        "suspects run ahead",
        "core",
        "self.runs_ahead and launched and not self.registry.suspects",
        "self.runs_ahead and launched",
    ),
    Patch(
        "bad values stay on offer when their holder has ended",
        "recovery",
        "        registry.space.distrust(bad)\n",
        "",
    ),
    Patch(
        "a step that could not be launched is run ahead of",
        "core",
        "        return not isinstance(pending, NotLaunched)\n",
        "        return True\n",
    ),
    Patch(
        "who is left of a batch is blamed",
        "recovery",
        "        if len(batch.live()) < len(batch):\n",
        "        if False:\n",
    ),
)
