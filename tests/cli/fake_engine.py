"""An engine without a model, which answers from a script. As a program: the command line with that engine."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from qkv_engine.errors import CapacityError, EngineDeadError, RequestError
from qkv_engine.metrics import EngineStats
from qkv_engine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

LOGGER = logging.getLogger("qkv_engine")

ANSWERS = {
    "What is 47*86?": "<think>\n47*80=3760 47*6=282\n</think>\n\n4042",
    "markdown": "# Title\n\nSome *text*.\n\n```python\nprint(1)\n\nprint(2)\n```\n\nThe end.",
    "raw": "4712*6: 2*6+0=12 1*6+1=7\n\n\n  *so* **28272**\n\n",
    "escape": "a\x1b[31mb\x9bc\x07",
    "slow": "word " * 400,
    "slow code": "Look:\n\n```python\n" + "".join(f"x{n} = {n}\n" for n in range(60)) + "```\n\nDone.",
    "slow but short": "word " * 30,
    "slow thinking": "<think>\n" + "hmm " * 400,
    "logged": "one two three four five",
}


class FakeTokenizer:
    """Every character is a token, but for a few special ones."""

    specials = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    special_ids = frozenset(range(4))
    chat_template = "{{ messages }}{% if enable_thinking is false %}<think></think>{% endif %}"

    def chat_prompt(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, list[int]]:
        text = "".join(message["content"] for message in messages)
        return text, [ord(char) for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.specials[i] if i in self.special_ids else chr(i) for i in ids)


class FakeEngine:
    """Streams scripted answers, five characters a time. ``fail``, ``long`` and ``die`` are questions that go wrong."""

    max_model_len = 8192
    vocab_size = 1024
    default_params = SamplingParams(temperature=0.0)
    tokenizer = FakeTokenizer()

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, Any]]] = []
        self.params: list[SamplingParams | None] = []
        self.template_kwargs: list[dict[str, Any] | None] = []
        self.aborted = 0
        self.closed = False
        for line in self.describe():
            LOGGER.info(line)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True

    def describe(self) -> list[str]:
        return ["Model fake on cpu in float32"]

    def stats(self) -> EngineStats:
        counts = dict.fromkeys(EngineStats.__struct_fields__, 0)
        known = {
            "model": "fake",
            "device": "cpu",
            "dtype": "float32",
            "kv": "bf16",
            "max_model_len": 8192,
            "num_threads": 1,
        }
        sizes = {"kv_bytes_total": 2**30, "kv_bytes_used": 2**20, "kv_tokens_capacity": 131072}
        blocks = {"kv_blocks": {"dense16": 1}, "kv_tokens_floor": 131072}
        blocks |= {"kv_group_blocks": (), "kv_group_bytes": (), "kv_group_windows": ()}
        blocks |= {"demotions": {}, "idle_demotions": {}, "prefix_hits": {}}
        bits = {"kv_rungs": {"dense16": 16.0}, "effective_bits": 16.0, "basis_miss": None}
        return EngineStats(**{**counts, **known, **sizes, **blocks, **bits})

    def stream(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
        end: int | None = None,
    ) -> Iterator[RequestOutput]:
        self.prompts.append(messages)
        self.params.append(params)
        self.template_kwargs.append(template_kwargs)
        question = messages[-1]["content"]
        if question == "fail":
            raise RequestError("out of range", field="top_k", value=-5)
        if question == "long":
            raise RequestError("the prompt leaves no room", field="max_model_len", value=8192)
        if question == "die":
            raise EngineDeadError("the engine stopped")
        reasoning, text = split(ANSWERS.get(question, f"echo: {question}"))
        length = len(reasoning) + len(text)
        limit = end or (params.max_tokens if params is not None else None) or length
        delay = 0.1 if question == "logged" else 0.02 * question.startswith("slow")
        return self._outputs(reasoning[:limit], text[: max(0, limit - len(reasoning))], limit < length, delay)

    def _outputs(self, reasoning: str, text: str, is_cut: bool, delay: float) -> Iterator[RequestOutput]:
        metrics = RequestMetrics(arrival_time=time.monotonic())
        finished, length = False, len(reasoning) + len(text)
        try:
            for end in range(5, length + 5, 5):
                time.sleep(delay)
                now = time.monotonic()
                metrics.first_token_time = metrics.first_token_time or now
                metrics.last_token_time = now
                finished = end >= length
                start, begin = max(0, end - 5 - len(reasoning)), max(0, end - len(reasoning))
                completion = CompletionOutput(
                    index=0,
                    text=text[:begin],
                    delta=text[start:begin],
                    reasoning=reasoning[:end] or None,
                    reasoning_delta=reasoning[end - 5 : end],
                    token_ids=list(range(min(end, length))),
                    finish_reason=("length" if is_cut else "stop") if finished else None,
                )
                if text == ANSWERS["logged"]:
                    LOGGER.warning("block %d stepped down", end)
                yield RequestOutput(
                    request_id="0",
                    prompt=None,
                    prompt_token_ids=[60, 61],
                    outputs=[completion],
                    finished=finished,
                    metrics=metrics,
                )
        finally:
            self.aborted += not finished


def split(answer: str) -> tuple[str, str]:
    """The reasoning and the rest of a scripted answer, as the engine tells them apart."""
    if not answer.startswith("<think>"):
        return "", answer
    reasoning, _, text = answer.removeprefix("<think>").partition("</think>")
    return reasoning.lstrip(), text.lstrip()


def open_fake(args: Any) -> FakeEngine:
    """What stands in for ``common.open_engine``; two model names fail as real ones may."""
    if args.model == "huge":
        raise CapacityError("holds 12 tokens", field="max_model_len", value=8192)
    if args.model == "bug":
        raise TypeError("oops")
    return FakeEngine()


if __name__ == "__main__":
    from qkv_engine.cli import common, main

    common.open_engine = open_fake  # type: ignore[assignment]
    sys.exit(main.main())
