"""Bounds, ids, lengths, and the defaults a model ships."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from qkv_engine.errors import ModelError, RequestError
from qkv_engine.request import SamplingParams
from qkv_engine.validation import (
    BOUNDS,
    default_params,
    describe_defaults,
    eos_token_ids,
    validate_lengths,
    validate_params,
    validate_prompt_ids,
)

VOCAB = 100


class Index:
    """An int in disguise, like numpy's."""

    def __index__(self) -> int:
        return 3


def check(**fields: Any) -> SamplingParams:
    return validate_params(SamplingParams(**fields), vocab_size=VOCAB)


ACCEPTED = [
    {},
    {"n": 64, "temperature": 0.1},
    {"temperature": 0, "top_k": 5},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": 2**31 - 1},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1.3, "presence_penalty": -2, "frequency_penalty": 2},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"min_tokens": 5, "max_tokens": 5},
    {"min_tokens": 5},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"num_prefill_tokens": 1},
    {"prompt_logprobs": 0, "prompt_logprob_ids": [[], [0, VOCAB - 1], list(range(20))]},
    {"stop": "x"},
    {"stop": ["x" * 256] * 16},
    {"stop": []},
    {"stop_token_ids": [0, VOCAB - 1]},
    {"stop_token_ids": []},
    {"allowed_token_ids": [4]},
    {"kept_token_ids": [4, 4]},
    {"logit_bias": {0: -100, 99: 100.0}},
    {"logit_bias": {}},
    {"bad_words": ["x", "y z"]},
    {"detokenize": False},
    {"no_repeat_ngram_size": 64},
    {"allowed_tokens": len},
]
REFUSED = [
    ("n", 0), ("n", 65), ("n", True), ("n", 1.0), ("n", None), ("n", "1"),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "0"),
    ("temperature", None), ("temperature", True), ("temperature", 101), ("temperature", 10**400),
    ("top_p", 0), ("top_p", 1.001), ("top_p", math.nan), ("top_p", -1),
    ("top_k", -2), ("top_k", 2**31), ("top_k", 1.5), ("top_k", False),
    ("min_p", -1e-9), ("min_p", 1.1), ("min_p", math.nan),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", math.nan),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", True),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", 16.0),
    ("min_tokens", -1), ("min_tokens", None),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("prompt_logprobs", 21),
    ("prompt_logprob_ids", [1]), ("prompt_logprob_ids", "1"), ("prompt_logprob_ids", [[VOCAB]]),
    ("prompt_logprob_ids", [[True]]), ("prompt_logprob_ids", [[0] * 21]), ("prompt_logprob_ids", [[0]]),
    ("num_prefill_tokens", 0), ("num_prefill_tokens", 1.0), ("num_prefill_tokens", 2**31),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 17), ("stop", ["x" * 257]), ("stop", [1]), ("stop", 5),
    ("stop", b"x"), ("stop", {"a": 1}),
    ("stop_token_ids", [VOCAB]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", [1.0]),
    ("stop_token_ids", "12"), ("stop_token_ids", [2**63]), ("stop_token_ids", [Index()]),
    ("kept_token_ids", [-1]), ("kept_token_ids", "x"),
    ("allowed_token_ids", []), ("allowed_token_ids", [VOCAB]), ("allowed_token_ids", [None]),
    ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {1: 100.1}), ("logit_bias", {1: math.nan}), ("logit_bias", {"1": 1}),
    ("logit_bias", {True: 1.0}), ("logit_bias", [1]), ("logit_bias", {1: True}),
    ("bad_words", [""]), ("bad_words", "x"), ("bad_words", ["x"] * 257), ("bad_words", [None]),
    ("no_repeat_ngram_size", -1), ("no_repeat_ngram_size", 65), ("no_repeat_ngram_size", 2.0),
    ("no_repeat_ngram_size", None), ("allowed_tokens", [1]), ("allowed_tokens", 0),
    ("ignore_eos", 1), ("skip_special_tokens", None), ("detokenize", "yes"), ("include_stop_str_in_output", 0),
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted(fields: dict[str, Any]) -> None:
    checked = check(**fields)
    assert check(**msgspec.structs.asdict(checked)) == checked  # the normal form is a fixed point


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda x: str(x)[:20])
def test_refused_with_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check(**{name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}=")
    assert len(str(caught.value)) < 400


def test_normal_form() -> None:
    checked = check(temperature=1, top_k=-1, stop="x")
    assert (checked.temperature, checked.top_k, checked.stop) == (1.0, 0, ["x"])
    assert type(checked.temperature) is float


def test_contradictions() -> None:
    assert check(n=2, temperature=0).n == 2  # equal completions
    with pytest.raises(RequestError, match="larger than max_tokens"):
        check(min_tokens=6, max_tokens=5)
    with pytest.raises(RequestError, match="stop strings"):
        check(stop="x", detokenize=False)
    with pytest.raises(RequestError, match="SamplingParams"):
        validate_params({"n": 1}, vocab_size=VOCAB)  # type: ignore[arg-type]


def test_ten_thousand_mutations_give_only_request_errors() -> None:
    rng = random.Random(0)
    scalars = [None, True, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, "", "x",
               b"x", "\ud800", object(), 1j, Index()]  # fmt: skip
    fields = [field.name for field in msgspec.structs.fields(SamplingParams)]

    def value(depth: int = 2) -> Any:
        kind = rng.random()
        if depth and kind < 0.2:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if depth and kind < 0.3:
            keys = [rng.choice([0, 5, -1, True, "a", 2**70, None, 1.5]) for _ in range(rng.randrange(4))]
            return {key: value(depth - 1) for key in keys}
        return rng.choice(scalars)

    accepted = 0
    for _ in range(10_000):
        chosen = rng.sample(fields, rng.randrange(1, 4))
        try:
            checked = check(**{name: value() for name in chosen})
        except RequestError:
            continue
        accepted += 1
        for name, bounds in BOUNDS.items():
            found = getattr(checked, name)
            assert found is None or (type(found) is bounds.kind and bounds.low <= found <= bounds.high)
    assert 100 < accepted < 9000


@pytest.mark.parametrize(
    "ids", [[], [-1], [VOCAB], [True], [1.0], ["1"], [None], "abc", None, [2**63], [[1]], [Index()], {1: 2}]
)
def test_prompt_ids_refused(ids: Any) -> None:
    with pytest.raises(RequestError) as caught:
        validate_prompt_ids(ids, VOCAB, 64)
    assert caught.value.field == "prompt_token_ids"


def test_prompt_ids_accepted() -> None:
    assert validate_prompt_ids((0, VOCAB - 1), VOCAB, 64) == [0, VOCAB - 1]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(1, None, 99), (99, None, 1), (100, None, None), (101, None, None), (60, 40, 40), (60, 41, None), (60, 39, 39)],
)
def test_lengths_at_the_boundary(num_prompt: int, max_tokens: int | None, expected: int | None) -> None:
    if expected is not None:
        assert validate_lengths(num_prompt, max_tokens, 100) == expected
        return
    with pytest.raises(RequestError) as caught:
        validate_lengths(num_prompt, max_tokens, 100)
    assert str(num_prompt) in str(caught.value) and "100" in str(caught.value)


def test_defaults_from_generation_config() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 512, "transformers_version": "4.51"}
    params = default_params(config)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.95, 512)
    assert describe_defaults(config) == "temperature=0.6, top_p=0.95, top_k=20, max_tokens=512"
    assert default_params({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert default_params({"do_sample": True, "temperature": None}) == SamplingParams()
    assert describe_defaults({"eos_token_id": 3}) == ""
    with pytest.raises(ModelError, match=r"generation_config\.json.*top_p"):
        default_params({"top_p": 7})


def test_eos_token_ids() -> None:
    class WithEos:
        eos_token_id = 7

    tokenizer: Any = WithEos()
    assert eos_token_ids({"eos_token_id": [2, 0]}, (5,), None, vocab_size=8) == [2, 0]
    assert eos_token_ids({"eos_token_id": 2}, (), tokenizer, vocab_size=8) == [2, 7]
    assert eos_token_ids({}, (5, 7), tokenizer, vocab_size=8) == [5, 7]
    assert eos_token_ids({}, (), None, vocab_size=8) == []
    for bad in (True, -1, "2", [None], 1.0, 8, [2, 8], 10**5000, {}, [[2]]):
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id=.* 0 to 7"):
            eos_token_ids({"eos_token_id": bad}, (), None, vocab_size=8)
    with pytest.raises(ModelError, match=r"tokenizer\.json: eos_token=7: .* 0 to 6"):
        eos_token_ids({"eos_token_id": 2}, (), tokenizer, vocab_size=7)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop_token_ids", list(range(1025)), 1024),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), 1024),
        ("allowed_token_ids", [0] * 5001, 5000),
    ],
)
def test_lists_that_every_step_looks_at_are_bounded(field: str, value: Any, limit: int) -> None:
    with pytest.raises(RequestError, match=f"{field}=.*at most {limit}"):
        validate_params(SamplingParams(**{field: value}), vocab_size=5000)


def test_ids_occur_once() -> None:
    assert check(stop_token_ids=[3, 3, 1]).stop_token_ids == [3, 1]
