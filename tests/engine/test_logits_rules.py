"""Rules about the next token that need those before: runs that may not repeat, and a caller's own function."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qkv_engine import Engine, RequestError, SamplingParams, StructuredOutputs
from qkv_engine.device.sampler import sample_tokens
from qkv_engine.sampling.allowed_tokens import AllowedTokens
from qkv_engine.sampling.ngrams import Ngrams
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.sampling.sample_tables import SampleTables

GREEDY = {"temperature": 0.0}


def runs(tokens: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_runs_are_those_of_transformers(size: int):
    """One index that grows with its request, beside the processor that looks at all tokens each time."""
    from transformers import NoRepeatNGramLogitsProcessor  # a second

    rng = random.Random(size)
    processor = NoRepeatNGramLogitsProcessor(size)
    for _ in range(30):
        prompt, index, of_prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 30))], Ngrams(size), Ngrams(size)
        of_prompt.read(prompt)
        tokens, others = [*prompt], [*prompt]
        shares, other = Ngrams(size, of_prompt), Ngrams(size, of_prompt)
        for _ in range(20):
            scores = processor(torch.tensor([tokens]), torch.zeros(1, 6))[0]
            banned = set((scores == -torch.inf).nonzero()[:, 0].tolist())
            assert set(index.last_tokens(tokens)) == set(shares.last_tokens(tokens)) == banned
            other.last_tokens(others)
            tokens += [rng.randrange(4) for _ in range(rng.randrange(3))]
            others += [rng.randrange(4) for _ in range(rng.randrange(3))]


def test_completions_share_the_runs_of_their_prompt(small_engine: Engine):
    """So that the memory, and the time in the engine's thread, of a long prompt is not that of all completions."""
    params = small_engine.params(n=4, no_repeat_ngram_size=3, max_tokens=2)
    submission = small_engine._intake.streamed([5 + i % 900 for i in range(4000)], params, None, None)
    submission.make_completions()
    rows = [submission.sample_row(completion.request, ()) for completion in submission.completions]
    assert len(rows) == 4 and {row._ngrams._prompt for row in rows} == {submission.prompt_ngrams}
    for row in rows:
        assert row.banned_ids().tolist() == [5 + 4000 % 900] and not row._ngrams._followers


def test_no_run_occurs_twice(small_engine: Engine):
    plain, ruled = small_engine.generate(
        ["Hello, hello, hello"] * 2,
        [small_engine.params(**GREEDY, max_tokens=200, ignore_eos=True, no_repeat_ngram_size=size) for size in (0, 3)],
    )
    for output, is_ruled in ((plain, False), (ruled, True)):
        prompt, found = output.prompt_token_ids, [*output.prompt_token_ids, *output.token_ids]
        new = runs(found, 3)[max(len(prompt) - 2, 0) :]
        assert (len({*new} - {*runs(prompt, 3)}) == len(new)) is is_ruled
    assert plain.token_ids[:1] == ruled.token_ids[:1] or runs(plain.prompt_token_ids, 3)


def test_a_run_that_repeats_is_the_same_before_and_after_a_restart(small_engine: Engine):
    params = small_engine.params(**GREEDY, max_tokens=60, ignore_eos=True, no_repeat_ngram_size=2)
    whole = small_engine.generate("one two one two", params)[0].token_ids
    stream = small_engine.stream("one two one two", params)
    for _ in range(20):
        next(stream)
    small_engine._loop.call(small_engine._started.core.recover)
    *_, last = stream
    assert last.token_ids == whole


@pytest.fixture
def digits(small_engine: Engine) -> list[int]:
    return [small_engine.tokenizer.encode(str(digit))[0] for digit in range(10)]


def test_a_function_names_the_tokens_that_may_come(small_engine: Engine, digits: list[int]):
    seen: list[list[int]] = []

    def allowed(output: list[int]) -> Any:
        seen.append(output)
        kinds = [{digits[1], digits[2]}, (digits[3],), [digits[4]] * 2, range(digits[5], digits[5] + 1), None]
        return kinds[len(output)] if len(output) < 5 else frozenset(digits)

    output = small_engine.generate("Hello", small_engine.params(allowed_tokens=allowed, max_tokens=8))[0]
    assert output.token_ids[0] in digits[1:3] and output.token_ids[1:4] == digits[3:6]
    assert set(output.token_ids[5:]) <= set(digits)
    assert seen == [output.token_ids[:number] for number in range(8)]


def test_each_completion_is_asked_about_its_own_tokens(small_engine: Engine, digits: list[int]):
    def up(output: list[int]) -> list[int]:
        start = digits.index(output[-1]) + 1 if output else 0
        return digits[start : start + 2]

    options = {"n": 5, "temperature": 2.0, "seed": 1, "max_tokens": 4}
    params = small_engine.params(**options)
    free, ruled = small_engine.generate(["Hello"] * 2, [params, small_engine.params(**options, allowed_tokens=up)])
    assert len({tuple(each.token_ids) for each in ruled.outputs}) > 1
    for each in ruled.outputs:
        assert each.token_ids == sorted(each.token_ids, key=digits.index) and len({*each.token_ids}) == 4
    assert free.outputs[0].token_ids == small_engine.generate("Hello", params)[0].outputs[0].token_ids


def test_a_function_holds_beside_masks_and_a_form(small_engine: Engine, digits: list[int]):
    options = {"max_tokens": 6, "temperature": 3.0, "allowed_tokens": lambda output: digits[:4]}
    masked = small_engine.params(**options, allowed_token_ids=digits[2:6])
    formed = small_engine.params(**options, structured_outputs=StructuredOutputs(regex="[2-9]{5}"))
    free = small_engine.params(max_tokens=6, allowed_tokens=lambda output: None)
    one, two, three = small_engine.generate(["Hello"] * 3, [masked, formed, free])
    assert set(one.token_ids) <= set(digits[2:4])
    assert (two.error is None and set(two.text) <= set("23")) or "no token is left" in str(two.error)
    assert three.token_ids == small_engine.generate("Hello", small_engine.params(max_tokens=6))[0].token_ids


def test_rules_that_leave_no_token_together_are_the_request_s_error(small_engine: Engine, digits: list[int]):
    """Alone in its step: without an entry of its own, a row would be sampled as if it had no rules."""
    allowed = {"allowed_token_ids": digits[5:], "max_tokens": 4}
    for rule in ({"allowed_tokens": lambda output: digits[:2]},
                 {"structured_outputs": StructuredOutputs(regex="[0-1]{3}")}):  # fmt: skip
        output = small_engine.generate("Hello", small_engine.params(**allowed, **rule))[0]
        assert output.token_ids == [] and "no token is left to sample" in output.error


def leave(output: list[int]) -> None:
    sys.exit(3)


def endless(output: list[int]) -> Iterator[int]:
    while True:
        yield 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda output: 1 // 0, "ZeroDivisionError"),
        (leave, "SystemExit"),
        (lambda: [1], "TypeError"),
        (lambda output: [], "allows no token"),
        (lambda output: set(), "allows no token"),
        (lambda output: [-1], "no such token"),
        (lambda output: [1 << 40], "no such token"),
        (lambda output: ["a"], "plain ints"),
        (lambda output: "abc", "must be a list"),
        (lambda output: 5, "must be a list"),
        (endless, "must be a list"),
        (lambda output: range(1 << 60), "ids"),
        (lambda output: range(1 << 32), "ids"),  # a list of it would take 150 GB
    ],
)
def test_a_function_that_fails_ends_its_request_alone(small_engine: Engine, function: Any, words: str):
    params = [small_engine.params(max_tokens=8), small_engine.params(max_tokens=8, allowed_tokens=function)]
    plain, failed = small_engine.generate(["Hello", "Hello"], params)
    assert failed.finish_reason == "error" and failed.error_field == "allowed_tokens"
    assert failed.error.startswith("allowed_tokens") and any(word in failed.error for word in words.split("|"))
    assert plain.token_ids == small_engine.generate("Hello", params[0])[0].token_ids


def test_what_is_no_function_is_refused(small_engine: Engine):
    for wrong in ([1, 2], 5, "x"):
        with pytest.raises(RequestError, match="allowed_token_ids") as caught:
            small_engine.params(allowed_tokens=wrong)
        assert caught.value.field == "allowed_tokens"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_rules_leave_their_neighbours_alone(temperature: float):
    """On the device of the machine, so with a GPU by its kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)).to(device)
    chooser = AllowedTokens(lambda output: [output[-1] + 1, 499], 500)

    def row(number: int, **rules: Any) -> SampleRow:
        options = rules.pop("chooser", None)
        return SampleRow(SamplingParams(temperature=temperature, **rules), number, [5, 6, 5], 1, chooser=options)

    def drawn(rows: list[SampleRow], first: int = 0) -> list[int]:
        return sample_tokens(logits[first : first + len(rows)], SampleTables.pack(rows)).wait().token_ids

    best = drawn([row(0)])[0]
    for rules in ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2}):
        found = drawn([row(0, **rules), row(1, chooser=chooser), row(2)])
        assert found[1] in (6, 499) and found[0] not in ({5, 6} if rules["no_repeat_ngram_size"] == 1 else {6})
        assert found[2] == drawn([row(2)], 2)[0] and (temperature or found[0] == best)
