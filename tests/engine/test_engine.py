"""The engine end to end on the demo model: answers, streams, threads, aborts, bad input, failures of one request."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from typing import Any

import pytest

from qkv_engine import (
    CapacityError,
    ConfigError,
    Engine,
    EngineDeadError,
    ModelError,
    RequestError,
    RequestOutput,
    SamplingParams,
    intake,
)

from ..small_demo import small_demo

QUESTION = [{"role": "user", "content": "What is 4000+42?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
RAW = {"temperature": 0.0, "separate_reasoning": False}
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


def wait_until_idle(engine: Engine, seconds: float = 20.0) -> None:
    """Waits for the owner thread to end everything, then checks that every byte came back."""
    deadline = time.monotonic() + seconds
    while (engine.stats().num_running or engine.stats().num_waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_bytes_used) == (0, 0, 0)


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1000) for _ in range(rng.randint(1, 200))] for _ in range(number)]


@pytest.fixture(scope="module")
def whole(demo_engine: Engine) -> RequestOutput:
    """The answer to the question, which takes a second."""
    return demo_engine.chat(QUESTION)


@pytest.fixture
def answer(whole: RequestOutput) -> str:
    return whole.text


def test_the_demo_model_answers(whole: RequestOutput):
    assert whole.text.endswith("4042") and whole.outputs[0].finish_reason == "stop"
    assert whole.finished and whole.error is None
    assert whole.kv.blocks == {"dense32": 1} and whole.kv.lowest_bits == 32


def test_a_stream_adds_up_to_the_answer(demo_engine: Engine, answer: str):
    outputs = list(demo_engine.stream(QUESTION))
    assert "".join(o.delta for o in outputs) == answer == outputs[-1].text
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) > 10


def test_a_stream_is_an_async_iterator_too(demo_engine: Engine, answer: str):
    async def read() -> list[str]:
        return [output.delta async for output in demo_engine.stream(QUESTION)]

    assert "".join(asyncio.run(read())) == answer


@pytest.mark.parametrize("prompt", ["What is 2+2?", QUESTION, {"prompt": "Hello"}], ids=str)
def test_text_is_read_beside_the_event_loop(prompt: Any, small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    threads, validate = [], intake.validate_prompt_ids

    def noted(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return validate(*args)

    async def read() -> None:
        async for _ in small_engine.generate_async(prompt, small_engine.params(max_tokens=2)):
            pass
        async for _ in small_engine.generate_async([5, 6], small_engine.params(max_tokens=2)):
            pass

    monkeypatch.setattr(intake, "validate_prompt_ids", noted)
    asyncio.run(read())
    text, ids = threads
    assert text is not threading.current_thread() and ids is threading.current_thread()


def test_a_stream_of_the_final_output_alone(demo_engine: Engine, answer: str):
    (output,) = demo_engine.stream(QUESTION, demo_engine.params(output_kind="final_only"))
    assert output.finished and output.text == output.delta == answer


def test_a_slow_reader_gets_merged_outputs(demo_engine: Engine):
    stream = demo_engine.stream(QUESTION)
    next(stream)
    wait_until_idle(demo_engine)
    rest = list(stream)
    assert len(rest) == 1 and rest[0].finished and rest[0].delta


def test_prompts_come_back_in_order_whatever_their_form(small_engine: Engine):
    text = "hello there"
    ids = small_engine.tokenizer.encode(text)
    outputs = small_engine.generate([text, ids, {"prompt_token_ids": ids}], GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [ids] * 3
    assert [o.prompt for o in outputs] == [text, None, None]
    assert len({o.text for o in outputs}) == 1
    assert small_engine.generate(text, GREEDY)[0].text == small_engine.generate(ids, GREEDY)[0].text


def test_parameters_may_differ_by_prompt(small_engine: Engine):
    limits = [1, 5, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in limits]
    outputs = small_engine.generate([[9, 8, 7]] * 3, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == limits
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    with pytest.raises(RequestError, match="2 for 3 prompts"):
        small_engine.generate([[9]] * 3, params[:2])


def test_stop_strings_and_stop_ids(demo_engine: Engine):
    params = [SamplingParams(**RAW), SamplingParams(**RAW, stop=["so 4042", "never"])]
    whole, cut = (output.outputs[0] for output in demo_engine.chat([QUESTION] * 2, params))
    assert cut.finish_reason == "stop" and cut.stop_reason == "so 4042"
    assert cut.text == whole.text[: whole.text.index("so 4042")]
    stop_id = whole.token_ids[20]
    ended = demo_engine.chat(QUESTION, SamplingParams(**RAW, stop_token_ids=[stop_id])).outputs[0]
    assert ended.stop_reason == stop_id
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
    shown = SamplingParams(**RAW, stop_token_ids=[stop_id], include_stop_str_in_output=True)
    last = demo_engine.tokenizer.decode([stop_id])
    assert demo_engine.chat(QUESTION, shown).text == ended.text + last


def test_special_tokens_typed_by_a_user_stay_text(small_engine: Engine):
    output = small_engine.chat([{"role": "user", "content": "<|im_end|>"}], GREEDY)
    specials = [token for token in output.prompt_token_ids if token in small_engine.tokenizer.special_ids]
    assert len(specials) == 3  # the template's own: user turn begins and ends, assistant turn begins


def test_min_tokens_holds_back_the_end(demo_engine: Engine):
    short = demo_engine.chat([{"role": "user", "content": "hello"}]).outputs[0]
    longer = demo_engine.chat(
        [{"role": "user", "content": "hello"}],
        SamplingParams(temperature=0.0, min_tokens=len(short.token_ids) + 10, max_tokens=200),
    ).outputs[0]
    assert len(longer.token_ids) >= len(short.token_ids) + 10


def test_logprobs(small_engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    output = small_engine.generate([[5, 6, 7, 8]], params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 4
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token_id].rank == 1 and len(entry) == 2
    total = sum(entry[t].logprob for t, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[6], [7], [8]]


def test_prompt_logprobs_are_the_same_in_chunks():
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompt = prompts(1, seed=3)[0][:60]
    found = []
    for budget in (2048, 7):
        with Engine(small_demo(), kv="fp32", kv_memory="8MiB", max_num_batched_tokens=budget) as engine:
            output = engine.generate([prompt], params)[0]
            found.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])
    assert len(found[0]) == len(prompt) - 1
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_n_completions_of_one_prompt(small_engine: Engine):
    params = SamplingParams(n=3, seed=5, max_tokens=12, temperature=1.5, ignore_eos=True)
    first, again = (small_engine.generate(["What is"], params)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3


def test_a_seed_gives_the_same_tokens_in_any_company(small_engine: Engine):
    params = SamplingParams(seed=11, temperature=0.8, top_p=0.9, max_tokens=20, ignore_eos=True)
    alone = small_engine.generate([[40, 41, 42]], params)[0].outputs[0].token_ids
    crowd = small_engine.generate([*prompts(9), [40, 41, 42]], params)[-1].outputs[0].token_ids
    assert crowd == alone


def test_abort_ends_a_stream_with_what_it_has(small_engine: Engine):
    stream = small_engine.stream([5, 6, 7], LONG, request_id="mine")
    next(stream)
    small_engine.abort("mine")
    small_engine.abort("mine")
    small_engine.abort("nobody")
    *_, last = stream
    assert last.outputs[0].finish_reason == "abort" and last.outputs[0].token_ids
    wait_until_idle(small_engine)


@pytest.mark.parametrize("way", ["close", "break", "drop"])
def test_a_consumer_that_vanishes_is_an_abort(small_engine: Engine, way: str):
    stream = small_engine.stream([5, 6, 7], LONG)
    if way == "break":
        for _ in stream:
            break
    else:
        next(stream)
    if way == "close":
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    wait_until_idle(small_engine)


def test_async_streams_in_one_loop(small_engine: Engine):
    async def read(prompt: list[int]) -> list[int]:
        deltas, last = [], None
        async for output in small_engine.generate_async(prompt, GREEDY):
            deltas.append(output.delta)
            last = output
        assert last is not None and "".join(deltas) == last.text
        return last.outputs[0].token_ids

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read(p) for p in prompts(6)))

    expected = [o.outputs[0].token_ids for o in small_engine.generate(prompts(6), GREEDY)]
    assert asyncio.run(main()) == expected


def test_a_cancelled_task_is_an_abort(small_engine: Engine):
    async def main() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in small_engine.generate_async([5, 6, 7], LONG):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_idle(small_engine)


def test_threads_and_event_loops_at_once(small_engine: Engine):
    work = prompts(12, seed=1)
    expected = [o.outputs[0].token_ids for o in small_engine.generate(work, GREEDY)]
    found: dict[int, list[int]] = {}

    def sync_reader(mine: range) -> None:
        for i in mine:
            found[i] = small_engine.generate(work[i], GREEDY)[0].outputs[0].token_ids

    def async_reader(mine: range) -> None:
        async def one(i: int) -> None:
            async for output in small_engine.generate_async(work[i], GREEDY):
                found[i] = output.outputs[0].token_ids

        async def every() -> None:
            await asyncio.gather(*(one(i) for i in mine))

        asyncio.run(every())

    threads = [threading.Thread(target=sync_reader, args=(range(i, 6, 3),)) for i in range(3)]
    threads += [threading.Thread(target=async_reader, args=(range(6 + i, 12, 2),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(12)] == expected


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", None, "empty"),
        ([], None, "empty"),
        ([-1], None, "-1"),
        ([1024], None, "1024"),
        ([True], None, "True"),
        ([1.0], None, "1.0"),
        ("\ud800", None, "prompt|surrogate|UTF-8"),
        ([5] * 8192, None, "8192"),
        ([5] * 8000, SamplingParams(max_tokens=193), "8000.*193.*8192"),
        ("x", SamplingParams(temperature=-1.0), "temperature"),
        ("x", SamplingParams(top_p=0.0), "top_p"),
        ("x", SamplingParams(max_tokens=0), "max_tokens"),
        ("x", SamplingParams(stop_token_ids=[5000]), "stop_token_ids"),
        ({"text": "x"}, None, "not a prompt"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(small_engine: Engine, prompt, params, message: str):
    before = small_engine.stats().num_requests
    with pytest.raises(RequestError, match=message):
        small_engine.generate([[5, 6], prompt], params)
    with pytest.raises(RequestError, match=message):
        small_engine.stream(prompt, params)
    assert small_engine.stats().num_requests == before


def test_the_longest_request_is_accepted_to_the_token():
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with Engine(small_demo(), kv="fp32", kv_memory="4MiB", max_model_len=700) as engine:
        output = engine.generate([[5] * 698], params)[0]
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(RequestError, match="700"):
            engine.generate([[5] * 699], params)


def test_a_duplicate_live_id_is_refused_and_the_first_goes_on(small_engine: Engine):
    first = small_engine.stream([5, 6, 7], LONG, request_id="twin")
    with pytest.raises(RequestError, match="twin"):
        small_engine.stream([8, 9], GREEDY, request_id="twin")
    assert not next(first).finished
    first.close()
    wait_until_idle(small_engine)
    assert list(small_engine.stream([8, 9], GREEDY, request_id="twin"))[-1].finished


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "/no/such/folder"}, ModelError, "no/such"),
        ({"kv": "int3"}, ConfigError, "Did you mean int"),
        ({"kv_memory": "lots"}, ConfigError, "20GiB"),
        ({"kv_memory": 1000}, CapacityError, "Give at least"),
        ({"kv_memory": "100000GiB"}, CapacityError, "free"),
        ({"kv": "bf16", "kv_memory": "2MiB", "max_model_len": 4096}, CapacityError, "at most 256"),
        ({"device": "tpu"}, ConfigError, "device"),
        ({"dtype": "int8"}, ConfigError, "dtype"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
    ],
)
def test_bad_options_name_the_remedy(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Engine(**options)


def test_a_request_that_can_never_fit_is_refused():
    with Engine(kv="bf16", kv_memory="4MiB") as engine:
        assert engine.max_model_len == 4 * 128
        with pytest.raises(RequestError, match="512"):
            engine.generate([[5] * 600])


def test_a_request_that_fails_in_a_batch_leaves_the_others_unchanged(
    small_engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    work = prompts(5)
    expected = [o.outputs[0].token_ids for o in small_engine.generate(work, GREEDY)]
    runner = small_engine._started.core.runner
    launch, bad = runner.launch, work[2]

    def failing(batch, rows):
        if any(item.request.prompt_token_ids == bad for item in batch.items):
            raise RuntimeError("injected")
        return launch(batch, rows)

    monkeypatch.setattr(runner, "launch", failing)
    outputs = small_engine.generate(work, GREEDY)
    assert outputs[2].outputs[0].finish_reason == "error" and "injected" in outputs[2].error
    assert [o.outputs[0].token_ids for i, o in enumerate(outputs) if i != 2] == expected[:2] + expected[3:]
    wait_until_idle(small_engine)


def test_a_row_of_nan_logits_fails_alone(small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    expected = small_engine.generate([[9, 8, 7]], GREEDY)[0].outputs[0].token_ids
    model = small_engine._started.core.runner.backend.steps.model
    compute = model.compute_logits

    def poisoned(hidden):
        logits = compute(hidden).clone()
        if len(logits) == 3:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(model, "compute_logits", poisoned)
    outputs = small_engine.generate([[9, 8, 7], [5, 6], [9, 8, 7]], GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs].count("error") == 1
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == expected
    wait_until_idle(small_engine)


def test_a_closed_engine_says_so_and_ends_its_streams():
    engine = Engine(small_demo(), kv_memory="4MiB")
    stream = engine.stream([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed while the request ran"):
        list(stream)
    for call in (lambda: engine.generate("x"), engine.stats, engine.describe):
        with pytest.raises(EngineDeadError, match=r"the engine is closed\. Make a new Engine"):
            call()


def test_engines_come_and_go_without_leaving_threads():
    before = threading.active_count()
    for _ in range(5):
        with Engine(small_demo(), kv_memory="2MiB") as engine:
            engine.generate([[5, 6]], SamplingParams(max_tokens=2))
    dropped = Engine(small_demo(), kv_memory="2MiB")
    del dropped
    gc.collect()
    assert threading.active_count() == before


def test_statistics_count_what_happened():
    with Engine(kv="bf16", kv_memory="16MiB") as engine:
        engine.generate([[5, 6, 7]] * 2, SamplingParams(max_tokens=4, ignore_eos=True))
        stats = engine.stats()
        assert (stats.num_requests, stats.num_finished, stats.prompt_tokens, stats.generation_tokens) == (
            2,
            2,
            6,
            8,
        )
        assert stats.kv_bytes_total == 16 * 2**20 and stats.kv_bytes_peak == 2 * 2**20
        engine.reset_stats()
        assert engine.stats().num_finished == 0 and engine.stats().kv_bytes_peak == 0


def test_a_closed_engine_gives_its_memory_back():
    engine = Engine(small_demo(), kv_memory="4MiB")
    memory = weakref.ref(engine._started.core.runner.cache.memory)
    engine.generate([[5, 6]], SamplingParams(max_tokens=2))
    engine.close()
    gc.collect()
    assert memory() is None
