"""The hand-over of outputs: a reader gets the state as it was reported, however late, and each wake-up is one call."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from qkv_engine.errors import EngineDeadError
from qkv_engine.request import CompletionOutput, Logprob, RequestOutputKind, SamplingParams
from qkv_engine.serving.stream import OutputStream, wake
from qkv_engine.serving.submission import Submission
from qkv_engine.text.reasoning import OutputText


def streamed(name: str, **params: Any) -> Submission:
    submission = Submission(name, None, [1, 2], SamplingParams(**params), 9, 0, [], True, floor=0)
    submission.make_completions()
    return submission


def add_token(submission: Submission, token_id: int) -> None:
    for completion in submission.completions:
        completion.request.token_ids.append(token_id)
        if completion.logprobs is not None:
            completion.logprobs.append({token_id: Logprob(-1.0, 1)})


def test_a_report_read_late_is_of_the_step_it_was_made_after():
    submission = streamed("a", n=2, logprobs=0)
    add_token(submission, 5)
    submission.stream.put(submission.report(finished=False))
    add_token(submission, 6)
    output = submission.stream.get(0)
    assert output is not None and [c.token_ids for c in output.outputs] == [[5], [5]]
    assert [[list(entry) for entry in c.logprobs or ()] for c in output.outputs] == [[[5]], [[5]]]
    assert submission.stream.get(0) is None
    submission.stream.put(submission.report(finished=False))
    add_token(submission, 7)
    newer = submission.stream.get(0)
    assert newer is not None and newer.token_ids == [5, 6] and output.token_ids == [5]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_hold_all_or_what_is_new_to_the_reader(kind: RequestOutputKind):
    submission = streamed("a", logprobs=0, output_kind=kind)
    text = OutputText(lambda: None)  # type: ignore[arg-type, return-value]
    submission.completions[0].output_text = text

    def step(token_id: int) -> None:
        add_token(submission, token_id)
        text.pieces.append(str(token_id))
        submission.stream.put(submission.report(finished=False))

    def read() -> CompletionOutput:
        output = submission.stream.get(0)
        assert output is not None and [list(one) for one in output.outputs[0].logprobs or ()] == [
            [token_id] for token_id in output.token_ids
        ]
        return output.outputs[0]

    is_delta = kind is RequestOutputKind.DELTA
    step(5)
    first = read()
    assert first.delta == first.text == "5" and first.delta_token_ids == first.token_ids == [5]
    step(6)
    step(7)
    second = read()
    assert second.delta == "67" and second.delta_token_ids == [6, 7]
    assert (second.text, second.token_ids) == (("67", [6, 7]) if is_delta else ("567", [5, 6, 7]))
    assert second.reasoning is None and second.reasoning_delta == ""
    text.thoughts = ["why", "not"]
    step(8)
    assert (last := read()).reasoning == last.reasoning_delta == "whynot" and last.delta == "8"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The callbacks that other threads hand to event loops."""
    found, call = list[object](), asyncio.BaseEventLoop.call_soon_threadsafe

    def noted(loop: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(callback)
        return call(loop, callback, *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", noted)
    return found


def test_readers_of_one_event_loop_are_woken_by_one_call(calls: list[object]):
    submissions = [streamed(f"r{i}") for i in range(20)]
    gone = submissions[3]

    async def read_all() -> list[Any]:
        readers = [asyncio.create_task(submission.stream.get_async()) for submission in submissions]
        await asyncio.sleep(0)  # all wait now
        readers[3].cancel()
        for submission in submissions:
            add_token(submission, 8)
            submission.stream.put(submission.report(finished=False))
        calls.clear()
        waker = threading.Thread(target=wake, args=([submission.stream for submission in submissions],))
        waker.start()
        found = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 10)
        waker.join()
        return found

    outputs = asyncio.run(read_all())
    assert len(calls) == 1
    for submission, output in zip(submissions, outputs, strict=True):
        if submission is gone:
            assert isinstance(output, asyncio.CancelledError)
        else:
            assert (output.request_id, output.token_ids) == (submission.request_id, [8])


def test_readers_in_threads_are_woken_and_told_of_the_error():
    stream, errors = OutputStream(), list[BaseException]()

    def read() -> None:
        try:
            stream.get(10)
        except EngineDeadError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not stream._bells:
        pass
    stream.fail(EngineDeadError("over"))
    reader.join(10)
    assert [str(error) for error in errors] == ["over"]


def test_a_closed_event_loop_has_no_readers():
    stream, loop = OutputStream(), asyncio.new_event_loop()
    task = loop.create_task(stream.get_async())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    stream.fail(EngineDeadError("over"))
    assert not stream._bells
    task._log_destroy_pending = False  # type: ignore[attr-defined]
