"""Log-probabilities of prompts as evaluation harnesses ask for them, and lm-eval itself as the client."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import Engine, Logprob
from qkv_engine.serve.logprobs import completion_logprobs

from ..bench.harness_tasks import write_tasks
from ..bench.test_lm_eval import engine_lm, responses
from .running import Running, running

PROMPTS = [[500, 61, 300, 77, 5], [9, 9, 9], [301] * 40]
CONTEXTS = [("What is 2+2?", " 4"), ("Sort: 5 99 23", " 5 23 99"), ("a", "b"), ("", "What is 47*86?"), ("é", "漢字")]


def scored(server: Running, **changes: Any) -> list[dict[str, Any]]:
    body = {"prompt": PROMPTS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234} | changes
    answer = server.post(body)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_each_prompt_of_a_batch_has_its_four_lists(server: Running, max_tokens: int):
    engine = server.engine
    outputs = engine.generate(PROMPTS, engine.params(prompt_logprobs=1, logprobs=1, max_tokens=1, temperature=0.0))
    for choice, output in zip(scored(server, max_tokens=max_tokens), outputs, strict=True):
        found, ids = choice["logprobs"], output.prompt_token_ids + output.token_ids[:max_tokens]
        entries = [*output.prompt_logprobs, *output.outputs[0].logprobs[:max_tokens]]
        assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), len(ids)
        )
        assert found["tokens"] == [engine.tokenizer.token_text(token_id) for token_id in ids]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        wanted = [entry[token_id].logprob for token_id, entry in zip(ids[1:], entries[1:], strict=True)]
        assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
        assert [max(top.values()) for top in found["top_logprobs"][1:]] == pytest.approx(
            [max(each.logprob for each in entry.values()) for entry in entries[1:]], abs=1e-4
        )
        assert found["text_offset"] == [0, *itertools.accumulate(map(len, found["tokens"][:-1]))]


def test_an_output_that_ends_at_once_has_its_end_among_the_lists(server: Running):
    """Harnesses cut the last entry off, whatever it is."""
    eos = server.engine.tokenizer.eos_token_id
    plain, ended = (scored(server, logit_bias=bias) for bias in ({eos: -100}, {eos: 100}))
    assert [choice["finish_reason"] for choice in ended] == ["stop"] * 3
    for one, other in zip(plain, ended, strict=True):
        assert one["logprobs"]["token_logprobs"][:-1] == other["logprobs"]["token_logprobs"][:-1]


def test_of_tokens_with_one_text_the_likeliest_is_told():
    """Parts of characters are all U+FFFD: the sampled one would seem to be the likeliest."""
    entry = {7: Logprob(-3.0, 4, "\ufffd"), 5: Logprob(-0.5, 1, "\ufffd"), 6: Logprob(-1.0, 2, "a")}
    found = completion_logprobs([7], [entry], 2, 0, None)
    assert found["token_logprobs"] == [-3.0] and found["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]


def test_lm_eval_scores_as_the_engine_does(server: Running):
    pytest.importorskip("tenacity")  # of lm-eval's extra for servers
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.utils import RemoteTokenizer

    harness = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="demo", tokenizer_backend="auto", max_length=512, batch_size=8
    )
    assert isinstance(harness.tokenizer, RemoteTokenizer)
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(CONTEXTS)]
    found = harness.loglikelihood(asked, disable_tqdm=True)
    engine, encode = server.engine, server.engine.tokenizer.encode
    for (total, is_greedy), (context, text) in zip(found, CONTEXTS, strict=True):
        before = encode(context) or [engine.tokenizer.eos_token_id]
        whole = encode(context + text) if context else before + encode(text)
        output = engine.generate(whole, engine.params(prompt_logprobs=0, max_tokens=1))[0]
        entries = list(zip(output.prompt_logprobs, whole, strict=True))[len(before) :]
        own = [entry[token_id] for entry, token_id in entries]
        assert math.isclose(total, sum(each.logprob for each in own), abs_tol=1e-3)
        assert is_greedy is all(each.rank == 1 for each in own)


def test_lm_eval_tokenizes_by_the_server(server: Running, demo_engine: Engine):
    from lm_eval.utils import RemoteTokenizer

    tokenizer, own = RemoteTokenizer(f"{server.url}/v1/completions"), demo_engine.tokenizer
    assert tokenizer.encode("What is 47*86?") == own.encode("What is 47*86?")
    assert tokenizer.decode(own.encode("ä b")) == "ä b"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", own.eos_token_id)
    assert (tokenizer.bos_token, tokenizer.pad_token) == (None, "<|endoftext|>")
    question = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(question) == own.chat_prompt(question)[0]


@pytest.mark.slow
def test_lm_eval_finds_the_same_over_http(tmp_path: Path):
    """Choices, rolling log-likelihoods and generated texts, as ``qkv-engine eval --lm-eval`` finds them."""
    pytest.importorskip("tenacity")  # of lm-eval's extra for servers
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = write_tasks(tmp_path)
    with Engine(kv="fp32", kv_memory="64MiB", max_model_len=1024) as engine, running(engine) as server:
        url = f"{server.url}/v1/completions"
        remote = LocalCompletionsAPI(url, model="demo", tokenizer_backend="remote", max_length=1025, batch_size=4)
        found, expected = responses(remote, folder), responses(engine_lm(engine), folder)
    assert found["demo_generate"] == expected["demo_generate"]
    for task in ("demo_choice", "demo_rolling"):
        ours, theirs = ([float(value) for value in flat(each[task])] for each in (found, expected))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4) and len(ours) >= 2


def flat(answers: Any) -> list[Any]:
    if not isinstance(answers, list | tuple):
        return [answers]
    return [each for answer in answers for each in flat(answer)]
