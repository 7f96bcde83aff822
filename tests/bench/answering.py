"""A fake engine that also answers the questions of the demo tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from qkv_engine.bench.questions import Task, ask
from qkv_engine.loading import demo_folder
from qkv_engine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from qkv_engine.text.tokenizer import Tokenizer

from .fake import FakeEngine


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(demo_folder())


@dataclass
class AnsweringEngine(FakeEngine):
    """Gives the first ``wrong`` questions of each task a wrong answer; ``log`` is told what happens, by ``name``."""

    tasks: Sequence[Task] = ()
    wrong: int = 0
    name: str = ""
    log: list[str] = field(default_factory=list)
    tokenizer: Any = field(default_factory=demo_tokenizer)
    vocab_size: int = 400

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.log.append(f"{self.name} closed")

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        self.log.append(f"{self.name} {'measured' if isinstance(params, SamplingParams) else 'asked'}")
        if isinstance(params, SamplingParams):
            return super().generate(prompts, params)
        if error := self.raises.get(len(prompts)):
            raise error
        return [self._answer(i, prompt) for i, prompt in enumerate(prompts)]

    def stats(self) -> Any:
        stats = super().stats()
        stats.kv_bytes_total = 64 * 2**20
        return stats

    def _answer(self, i: int, prompt: list[int]) -> RequestOutput:
        known = {
            tuple(asked.prompt): example.reply
            for task in self.tasks
            for example, asked in zip(task.examples, ask(self.tokenizer, task.examples), strict=True)
        }
        text = "no" if i < self.wrong else known[tuple(prompt)]
        return RequestOutput(
            request_id=str(i),
            prompt=None,
            prompt_token_ids=prompt,
            outputs=[CompletionOutput(index=0, text=text, finish_reason="stop")],
            finished=True,
            metrics=RequestMetrics(),
        )
