"""Reasoning apart from the answer: pairs of marks by the tokens that a tokenizer has, and messages with channels."""

from __future__ import annotations

import json

import pytest
import tokenizers

from qkv_engine.text.find_marks import PAIRS, find_marks
from qkv_engine.text.reasoning import OutputText, ReasoningMarks
from qkv_engine.text.stop_strings import StopFinder
from qkv_engine.text.tokenizer import Tokenizer

from ..serve.family_models import DEMO, tokenizer_of

ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 5."
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
HARMONY = tokenizer_of("gpt-oss")


def tokenizer_with(*marks: str) -> Tokenizer:
    """The demo's tokenizer with these tokens in place of its marks of reasoning."""
    source = json.loads((DEMO / "tokenizer.json").read_text())
    for token, mark in zip(source["added_tokens"][3:5], marks, strict=True):
        token["content"] = mark
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(source)), {})


def read(tokenizer: Tokenizer, text: str, prompt: str = "Hi", stop: str = "") -> OutputText:
    marks = find_marks(tokenizer)
    assert marks is not None
    after = marks.after(tokenizer.encode(prompt))
    stops = StopFinder([stop], False) if stop else None
    output = after.output_text(lambda: tokenizer.text_stream(True, ()), stops, 0)
    for token_id in tokenizer.encode(text):
        output.push(token_id)
        if output.stopped is not None:
            break
    output.finish()
    return output


@pytest.mark.parametrize(("opening", "closing", "label"), PAIRS)
def test_every_family_s_marks_tell_reasoning_from_the_answer(opening: str, closing: str, label: str):
    tokenizer = tokenizer_with(opening, closing)
    head = f"{label}\n" if label else ""
    output = read(tokenizer, f"{opening}{head}Let me see.{closing}\n\nFive.")
    assert (output.reasoning, output.text) == ("Let me see.", "Five.")
    assert output.num_reasoning_tokens == len(tokenizer.encode(f"{opening}{head}Let me see.{closing}"))
    begun = read(tokenizer, f"{head}Hm.{closing}Five.", prompt=f"Hi{opening}")
    assert (begun.reasoning, begun.text) == ("Hm.", "Five.")
    assert read(tokenizer, "Five.").reasoning is None


def test_a_label_that_does_not_come_is_no_loss():
    output = read(tokenizer_with("<|channel>", "<channel|>"), "<|channel>This.<channel|>Five.")
    assert (output.reasoning, output.text) == ("This.", "Five.")


def test_a_tokenizer_without_marks_has_none():
    assert find_marks(tokenizer_with("<a>", "<b>")) is None
    assert isinstance(find_marks(tokenizer_with("<think>", "</think>")), ReasoningMarks)


@pytest.mark.parametrize(
    ("written", "reasoning", "text"),
    [
        (ANALYSIS + FINAL, "Let me see.", "It is 5."),
        (f"{ANALYSIS}{FINAL}<|return|>", "Let me see.", "It is 5."),
        ("<|channel|>final<|message|>It is 5.", None, "It is 5."),
        ("It is 5.", None, "It is 5."),
        (ANALYSIS, "Let me see.", ""),
        ("<|channel|>analysis<|message|>Let me", "Let me", ""),
        ("<|channel|>ana", None, ""),
        (f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL}", "Let me see.\n\nLet me see.", "It is 5."),
        (f"{ANALYSIS.removesuffix('<|end|>')}{FINAL}", "Let me see.", "It is 5."),
        (f"<|channel|>commentary<|message|>First.<|end|>{FINAL}", None, "First.\n\nIt is 5."),
        (ANALYSIS + CALL, "Let me see.", CALL),
        (CALL.removeprefix("<|start|>assistant"), None, CALL),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}",
            None,
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        ),
        (f"{ANALYSIS}It is 5.", "Let me see.", "It is 5."),
    ],
)
def test_messages_are_told_apart_by_their_channels(written: str, reasoning: str | None, text: str):
    output = read(HARMONY, written, prompt="<|start|>assistant")
    assert (output.reasoning, output.text) == (reasoning, text)


def test_reasoning_tokens_are_those_of_the_analysis_and_its_marks():
    output = read(HARMONY, ANALYSIS + FINAL)
    assert output.num_reasoning_tokens == len(HARMONY.encode(ANALYSIS))


def test_a_header_without_an_end_becomes_text():
    output = read(HARMONY, "<|channel|>" + "x y " * 200)
    assert output.text == "<|channel|>" + "x y " * 200


def test_stop_strings_are_looked_for_in_the_answer():
    output = read(HARMONY, ANALYSIS.replace("see", "5") + FINAL, stop="5")
    assert (output.reasoning, output.text, output.stopped) == ("Let me 5.", "It is ", "5")


def test_a_prompt_may_end_within_a_message():
    output = read(HARMONY, "It is 5.<|end|>", prompt="<|start|>assistant<|channel|>final<|message|>")
    assert (output.reasoning, output.text) == (None, "It is 5.")


def test_special_tokens_that_are_kept_stay_in_the_text():
    tokenizer = tokenizer_of("mistral")
    mark = tokenizer.token_of("[TOOL_CALLS]")
    assert mark is not None and mark in tokenizer.special_ids
    for kept, text in (([mark], "[TOOL_CALLS]f{}"), ([], "f{}")):
        stream = tokenizer.text_stream(True, (), kept)
        ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{}<|im_end|>")
        assert "".join(map(stream.push, ids)) + stream.finish() == text
