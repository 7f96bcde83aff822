"""The forms in which requests are made and outputs read."""

from __future__ import annotations

import pickle
import random
import threading
import time
from importlib import import_module

import pytest

import qkv_engine
from qkv_engine import Engine, EngineStats, KVUsage, RequestError, RequestOutput, RequestStream, SamplingParams
from qkv_engine.text.find_marks import find_marks
from qkv_engine.text.reasoning import OutputText, ReasoningMarks
from qkv_engine.text.stop_strings import StopFinder

QUESTION = "What is 4000+42?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(demo_engine: Engine) -> RequestOutput:
    """The answer to the question, which takes a second."""
    return demo_engine.chat(QUESTION)


def test_a_string_is_one_user_message(demo_engine: Engine, whole: RequestOutput):
    output = whole
    assert output.text == "4042" and output.finish_reason == "stop"
    for messages in (MESSAGES, tuple(MESSAGES)):
        assert demo_engine.chat(messages, SHORT).token_ids == output.token_ids[: SHORT.max_tokens]
    assert output.reasoning is not None and "0+2+0=2" in output.reasoning and "think" not in output.reasoning


def test_several_conversations_give_a_list(demo_engine: Engine):
    other = [{"role": "user", "content": "Sort: 5 99 23 11"}]
    outputs = demo_engine.chat([MESSAGES, other], request_id=["one", "two"])
    assert [output.text for output in outputs] == ["4042", demo_engine.chat(other).text]
    assert [output.request_id for output in outputs] == ["one", "two"]
    assert len(demo_engine.chat([MESSAGES], SHORT)) == 1


def test_raw_text_on_request(demo_engine: Engine):
    params = [demo_engine.params(separate_reasoning=False, skip_special_tokens=skip) for skip in (True, False)]
    output, tagged = demo_engine.chat([MESSAGES] * 2, params)
    assert output.reasoning is None and output.text.endswith("\n\n4042") and "0+2+0=2" in output.text
    assert tagged.text.startswith("<think>") and "</think>" in tagged.text
    completion = demo_engine.generate(output.prompt_token_ids)[0]
    assert completion.reasoning is None and completion.text == output.text


def test_a_stream_adds_up_in_both_parts(demo_engine: Engine, whole: RequestOutput):
    with demo_engine.stream(MESSAGES) as stream:
        assert isinstance(stream, RequestStream)
        outputs = list(stream)
    assert "".join(output.reasoning_delta for output in outputs) == whole.reasoning
    assert "".join(output.delta for output in outputs) == whole.text == "4042"


def test_a_bar_counts_the_requests_and_leaves_no_thread(small_engine: Engine, capsys: pytest.CaptureFixture[str]):
    before = threading.enumerate()
    outputs = small_engine.chat([MESSAGES, MESSAGES], SHORT, use_tqdm=True)
    assert [len(output.token_ids) for output in outputs] == [4, 4]
    out, err = capsys.readouterr()
    assert out == "" and "Requests: 100%" in err and "2/2" in err and threading.enumerate() == before
    small_engine.chat(MESSAGES, SHORT)
    assert capsys.readouterr().err == ""


def test_a_bar_is_the_one_that_notebooks_draw(small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    drawn, bar = [], import_module("tqdm.auto").tqdm
    begin = bar.__init__

    def draw(self: object, *args: object, **options: object) -> None:
        drawn.append(options["desc"])
        begin(self, *args, **options)

    monkeypatch.setattr(bar, "__init__", draw)
    small_engine.chat([MESSAGES, MESSAGES], SHORT, use_tqdm=True)
    assert drawn == ["Requests"]


def test_a_with_block_left_early_aborts(small_engine: Engine):
    long = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
    with small_engine.stream(MESSAGES, long) as stream:
        next(stream)
    assert list(stream) == []


def test_a_tenant_with_more_requests_than_places_delays_no_other(small_engine: Engine):
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, tenant="a")
    streams = [small_engine.stream([5, 6 + index], long) for index in range(80)]  # for 64 places
    next(streams[0])
    small_engine.generate([[7]], SamplingParams(max_tokens=1, tenant="b"))
    stats = small_engine.stats()
    for stream in streams:
        stream.close()
    assert stats.num_running <= 56 and stats.num_running + stats.num_waiting == 80  # none of them has ended


def test_params_begin_at_the_models(demo_engine: Engine):
    changed = demo_engine.params(kv_pinned=True, max_tokens=3)
    assert changed.temperature == demo_engine.default_params.temperature == 0.0
    assert changed.kv_pinned and changed.max_tokens == 3
    with pytest.raises(RequestError, match="kv_flor"):
        demo_engine.params(kv_flor="int8")
    with pytest.raises(RequestError, match="temperature"):
        demo_engine.params(temperature="hot")


def test_ids_reach_every_call(small_engine: Engine):
    outputs = small_engine.generate([[5], [6]], SHORT, request_id=["a", "b"])
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert small_engine.generate([5, 6], SHORT, request_id="mine")[0].request_id == "mine"
    assert small_engine.chat("hi", SHORT, request_id="hello").request_id == "hello"
    with pytest.raises(RequestError, match="a live request has this id"):
        small_engine.generate([[5], [6]], SHORT, request_id=["c", "c"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.chat(MESSAGES[0]), "a message alone.*list such as"),
        (lambda e: e.chat([]), "not a conversation"),
        (lambda e: e.chat([[]]), "not a conversation"),
        (lambda e: e.chat([5, 6]), "not a conversation"),
        (lambda e: e.generate(MESSAGES), "messages.*chat"),
        (lambda e: e.generate("hi", {"max_tokens": 3}), r"params={'max_tokens': 3}.*SamplingParams\(\*\*"),
        (lambda e: e.generate(["a", "b"], [SHORT]), "1 for 2 prompts"),
        (lambda e: e.generate([1], 3), "params=3"),
        (lambda e: e.generate({"text": "x"}), "not a prompt.*prompt_token_ids"),
        (lambda e: e.stream("x", template_kwargs={"a": 1}), "template_kwargs.*conversations"),
        (lambda e: e.stream(["a", "b"]), r"several prompts\. Give one, or all of them to generate"),
        (lambda e: e.chat("hi", request_id="a\nb"), "request_id"),
        (lambda e: e.chat("hi", request_id=""), "request_id"),
    ],
)
def test_wrong_forms_say_what_would_work(small_engine: Engine, call, message: str):
    with pytest.raises(RequestError, match=message):
        call(small_engine)


def test_things_print_in_a_line(demo_engine: Engine, whole: RequestOutput):
    output = whole
    assert repr(output) == f"<RequestOutput {output.request_id}: {len(output.token_ids)} tokens, stop: '4042'>"
    assert len(repr(demo_engine.chat("hi", demo_engine.params(max_tokens=500, separate_reasoning=False)))) < 200
    assert repr(demo_engine) == "<Engine demo on cpu in float32, kv='fp32'>"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(demo_engine)
    assert pickle.loads(pickle.dumps(output)) == output
    assert isinstance(demo_engine.stats(), EngineStats) and KVUsage().blocks == {}


def test_a_snapshot_says_when_it_was_taken(small_engine: Engine):
    before = time.monotonic()
    assert before <= small_engine.stats().time <= time.monotonic()


def test_every_public_name_is_there():
    for name in qkv_engine.__all__:
        assert getattr(qkv_engine, name) is not None
    assert {"EngineStats", "Logprob", "RungConfig", "DENSE16", "RequestStream"} <= set(qkv_engine.__all__)


# ---- reasoning


def output_text(engine: Engine, marks: ReasoningMarks | None, *stop: str, min_tokens: int = 0) -> OutputText:
    return OutputText(engine.tokenizer.text_stream, StopFinder(stop) if stop else None, marks, min_tokens)


def test_marks_in_any_place(small_engine: Engine):
    tokenizer = small_engine.tokenizer
    marks = find_marks(tokenizer)
    opening, closing = marks.opening, marks.closing
    space, word, other = (tokenizer.encode(t, add_special_tokens=False) for t in ("\n", "47", "so"))

    def parts(ids: list[int], prompt: list[int] = ()) -> tuple[str | None, str]:  # type: ignore[assignment]
        found = output_text(small_engine, marks.after(prompt))
        for token_id in ids:
            found.push(token_id)
        found.finish()
        return found.reasoning, found.text

    think = [opening, *space, *word, *space, closing]
    assert parts([*think, *space, *space, *other]) == ("47\n", "so")
    assert parts([*space, *think, *other]) == ("47\n", "so")
    assert parts(other + word) == (None, "so47")
    assert parts([*other, *think, *word]) == (None, "so\n47\n47")  # an answer that speaks of thinking
    assert parts([*word, closing, *other], prompt=[9, opening, *space]) == ("47", "so")
    assert parts([*word, *other], prompt=[opening, *word, closing]) == (None, "47so")
    assert parts([opening, *word]) == ("47", "")
    assert parts([*think, *think, *other]) == ("47\n\n47\n", "so")
    assert parts([]) == parts([opening, *space]) == (None, "")
    assert parts([opening, *space, *space, closing, *space, *word]) == (None, "47")  # nothing was thought


def test_parts_do_not_depend_on_how_often_they_are_looked_at(small_engine: Engine):
    tokenizer, rng = small_engine.tokenizer, random.Random(3)
    marks = find_marks(tokenizer)
    for _ in range(200):
        ids = [rng.choice((marks.opening, marks.closing, *range(5, 300))) for _ in range(rng.randint(0, 20))]
        found, raw = output_text(small_engine, marks), output_text(small_engine, None)
        for token_id in ids:
            found.push(token_id)
            raw.push(token_id)
        found.finish()
        raw.finish()
        joined = (found.reasoning or "") + found.text
        assert "".join(joined.split()) == "".join(raw.text.split())


def test_stop_strings_look_at_the_answer_alone(demo_engine: Engine, whole: RequestOutput):
    assert "0=4" in whole.reasoning and whole.text == "4042"

    asked = [{"stop": stop} for stop in (["0=4", "\n\n", "Question:", "\n"], ["0=4", "4"], ["42"])]
    asked += [{"stop": ["42"], "include_stop_str_in_output": True}, {"stop": ["4"], "max_tokens": 5}]
    outputs = demo_engine.chat([MESSAGES] * 5, [demo_engine.params(**each) for each in asked])
    ended = [(each.reasoning, each.text, each.finish_reason, each.outputs[0].stop_reason) for each in outputs]
    endings = [("4042", "stop", None), ("", "stop", "4"), ("40", "stop", "42"), ("4042", "stop", "42")]
    assert ended[:4] == [(whole.reasoning, *ending) for ending in endings]
    reasoning, *ending = ended[4]  # the reasoning is never closed
    assert whole.reasoning.startswith(reasoning) and ending == ["", "length", None]


def test_a_stop_string_ends_a_stream_in_its_answer(demo_engine: Engine, whole: RequestOutput):
    params = demo_engine.params(stop=["0=4", "\n\n", "42"], output_kind="delta")
    outputs = list(demo_engine.stream([{"role": "user", "content": QUESTION}], params))
    assert "".join(output.delta for output in outputs) == "40" and outputs[-1].outputs[0].stop_reason == "42"
    assert "".join(output.reasoning_delta for output in outputs) == whole.reasoning


def test_stops_that_see_the_reasoning(demo_engine: Engine, whole: RequestOutput):
    marks = find_marks(demo_engine.tokenizer)
    raw = demo_engine.chat(QUESTION, demo_engine.params(stop=["0=4"], separate_reasoning=False))
    assert raw.outputs[0].stop_reason == "0=4"
    assert raw.text.strip() == whole.reasoning.partition("0=4")[0].strip()
    prompt = demo_engine.tokenizer.chat_prompt([{"role": "user", "content": QUESTION}], {}, max_tokens=100)[0]
    assert demo_engine.generate(prompt, demo_engine.params(stop=["0=4"]))[0].text == raw.text
    by_token = demo_engine.chat(QUESTION, demo_engine.params(stop_token_ids=[marks.closing]))
    assert by_token.outputs[0].stop_reason == marks.closing and by_token.text == ""
    assert by_token.reasoning == whole.reasoning


def test_stop_strings_and_marks(small_engine: Engine):
    tokenizer = small_engine.tokenizer
    marks = find_marks(tokenizer)
    opening, closing = marks.opening, marks.closing
    space, word, other = (tokenizer.encode(t, add_special_tokens=False) for t in ("\n", "47", "so"))

    def parts(ids: list[int], *stop: str, min_tokens: int = 0) -> tuple[str | None, str, str | None]:
        found = output_text(small_engine, marks, *stop, min_tokens=min_tokens)
        for token_id in ids:
            found.push(token_id)
        found.finish()
        return found.reasoning, found.text, found.stopped

    think = [opening, *other, *space, closing]
    assert parts([*think, *space, *space, *word, *space], "\n\n", "so", "\n4") == ("so\n", "47\n", None)
    assert parts([*think, *space, *word, *space, *word], "\n", "so\n") == ("so\n", "47", "\n")
    assert parts([*space, *space, *word], "\n") == (None, "47", None)  # white space before an answer is no part of it
    assert parts([*other, *think, *word], "so?") == (None, "soso\n47", None)  # held back, but the answer has begun
    assert parts([*think, *word, *other, *word], "47", min_tokens=len(think) + 2) == ("so\n", "47so", "47")
