"""Bugs put into the engine's core on purpose."""

from __future__ import annotations

from .patch import Patch

CORE = (
    Patch(
        "recovery does not look for stops",
        "registry",
        "Registry._restore",
        "reason = completion.read()",
        "reason, completion.num_read = (None, completion.request.num_output_tokens)",
    ),
    Patch(
        "recovery forgets where blocks stood",
        "recovery",
        "Recovery.restart",
        "for completion in submission.completions:\n    registry.note_usage(completion)",
        "pass",
    ),
    Patch(
        "recovery keeps the times of lost tokens",
        "registry",
        "Registry._restore",
        "del times[completion.request.num_output_tokens:]",
        "pass",
    ),
    Patch(
        "recovery reports no end",
        "registry",
        "Registry._restore",
        "if submission.error is not None:\n"
        "    self.end(submission, submission.error)\n"
        "elif submission.finished:\n"
        "    self.report(submission)",
        "if submission.error is not None:\n    self.end(submission, submission.error)",
    ),
    Patch(
        "an ended request is remembered", "registry", "Registry._close", "self.rows.pop(completion.request, None)", ""
    ),
    Patch(
        "a refused request is remembered",
        "registry",
        "Registry.finish",
        "request.status = FINISHED",
        "request.status = FINISHED\nreturn",
    ),
    Patch(
        "one failure takes the batch along",
        "recovery",
        "Recovery.run_again",
        "len(batch) > 1 or may_halve",
        "False",
    ),
    Patch(
        "holders of bad values go on",
        "recovery",
        "Recovery.fail_holders",
        "not (request.is_finished or bad.isdisjoint(registry.space.tables.blocks(request.request_id)))",
        "False",
    ),
    Patch(
        "a request stops a token late",
        "submission",
        "Completion.read_token",
        "return FinishReason.LENGTH if self.num_read >= request.max_tokens else None",
        "return FinishReason.LENGTH if self.num_read > request.max_tokens else None",
    ),
    Patch(
        "ends of sequence are ignored",
        "submission",
        "Submission.ends",
        "own = () if self.params.ignore_eos else eos_ids",
        "own: tuple[int, ...] = ()",
    ),
    Patch("recovery keeps steps under way", "core", "EngineCore.recover", "self._in_flight.clear()", ""),
    Patch("what follows a step that broke off is kept", "core", "EngineCore._collect", "is_followed", "False"),
    Patch(
        "an ended request is given another token",
        "core",
        "EngineCore._accept",
        "if request.status is FINISHED:\n    continue",
        "if False:\n    continue",
    ),
    Patch("two steps run ahead", "core", "EngineCore.step", "may_run_ahead", "2 * may_run_ahead"),
    Patch("nobody waits for the last step", "core", "EngineCore._launch", "return False", "return True"),
    Patch(
        "suspects run ahead",
        "core",
        "EngineCore.step",
        "may_run_ahead = self.runs_ahead and launched and (not self.registry.suspects)",
        "may_run_ahead = self.runs_ahead and launched",
    ),
    Patch(
        "bad values stay on offer when their holder has ended",
        "recovery",
        "Recovery.fail_holders",
        "registry.space.distrust(bad)",
        "",
    ),
    Patch(
        "a step that could not be launched is run ahead of",
        "core",
        "EngineCore._launch",
        "return not isinstance(pending, NotLaunched)",
        "return True",
    ),
    Patch("who is left of a batch fails", "recovery", "Recovery.run_again", "len(batch.live()) < len(batch)", "False"),
)
