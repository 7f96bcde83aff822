"""``Engine``: the embedded interface. Blocking, streaming and async calls over one owner thread."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch

from .config import DEFAULT_KV, EngineConfig, KVConfig, resolve_kv
from .errors import CapacityError, EngineDeadError, RequestError
from .loop import EngineLoop
from .metrics import EngineStats
from .request import RequestOutput, SamplingParams
from .startup import Started, start
from .submission import Submission
from .tokenizer import Tokenizer
from .validation import validate_lengths, validate_params, validate_prompt_ids

Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]


class Engine:
    """A model, its KV memory and a scheduler, ready for requests from any thread or event loop.

    ``model`` is a local folder, a Hub id, or with ``load_format="random"`` a named shape; ``None`` is the demo model
    inside the package. ``kv`` is a preset name or a ``KVConfig``; ``kv_memory`` is bytes, "20GiB", or a share of
    the memory that is free once the weights are loaded. ``max_model_len`` may be longer than the model was made for
    only with ``extend_context=True``. ``cuda_graphs=False`` saves a GPU the memory of captured steps and makes small
    ones slower.
    Raises ``ConfigError``, ``ModelError`` or ``CapacityError``, each naming the remedy.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        kv: str | KVConfig = DEFAULT_KV,
        kv_memory: int | str | float | None = None,
        kv_quota: float | None = None,
        prefix_caching: bool = True,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        extend_context: bool = False,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        cuda_graphs: bool = True,
        load_format: str = "auto",
        revision: str | None = None,
        token: str | None = None,
        seed: int = 0,
    ):
        config = EngineConfig(
            model=model,
            kv=resolve_kv(kv),
            kv_memory=kv_memory,
            kv_quota=kv_quota,
            prefix_caching=prefix_caching,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            extend_context=extend_context,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            cuda_graphs=cuda_graphs,
            load_format=load_format,
            revision=revision,
            token=token,
            seed=seed,
        )
        self._started: Started | None = start(config)
        self._loop = EngineLoop(self._started.core)
        self._ids = count()
        self._finalizer = weakref.finalize(self, self._loop.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` for a bare shape, which takes and gives token ids alone."""
        return self._alive.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return self._alive.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: token ids lie below."""
        return self._alive.config.vocab_size

    @property
    def default_params(self) -> SamplingParams:
        """What a request without parameters uses: vLLM's defaults under the model's ``generation_config.json``."""
        return self._alive.default_params

    def describe(self) -> list[str]:
        """What is in effect: model, KV memory in tokens, concurrency, defaults taken from the model."""
        return list(self._alive.summary)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts and returns one output each, in order; ``use_tqdm`` shows a bar on stderr.

        A prompt is a string, a list of token ids, or ``{"prompt_token_ids": [...]}``. An invalid prompt or parameter
        raises ``RequestError`` before anything runs; a request that fails later has ``finish_reason`` "error".
        """
        many = _as_list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} sampling parameters for {len(many)} prompts", field="params")
        return self._run_all([self._prepare(p, s, None, False) for p, s in zip(many, each, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """Answers a conversation (dicts with ``role`` and ``content``) through the model's chat template."""
        return self._run_all([self._prepare(messages, params, None, False, template_kwargs)], False)[0]

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> RequestStream:
        """Submits a prompt or a conversation at once and iterates over its outputs, each with the new ``delta``.

        Closing or dropping the iterator aborts the request.
        """
        submission = self._prepare(prompt, params, request_id, True, template_kwargs)
        self._loop.submit(submission)
        return RequestStream(self._loop, submission)

    async def generate_async(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like ``stream`` for ``async for``; cancelling the task or closing the generator aborts the request."""
        submission = self._prepare(prompt, params, request_id, True, template_kwargs)
        self._loop.submit(submission)
        finished = False
        try:
            while not finished:
                output = await submission.stream.get_async()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._loop.abort(submission.request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment with ``finish_reason`` "abort"; an unknown or ended id is ignored."""
        self._loop.abort(request_id)

    def stats(self) -> EngineStats:
        """A snapshot of load, memory and counters."""
        started = self._alive
        return self._loop.call(lambda: _snapshot(started))

    def reset_stats(self) -> None:
        """Sets counters to zero and the peak to what is in use now."""
        self._loop.call(self._alive.core.reset_counters)

    def close(self) -> None:
        """Ends all requests, stops the thread and frees memory. May be called again."""
        self._finalizer()
        if self._started is not None and self._started.device.type == "cuda":
            torch.cuda.empty_cache()
        self._started = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _alive(self) -> Started:
        if self._started is None:
            raise EngineDeadError("the engine is closed", remedy="Make a new Engine")
        return self._started

    def _prepare(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None,
        request_id: str | None,
        incremental: bool,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Submission:
        """Checks and tokenizes one request in the caller's thread. Raises ``RequestError``."""
        started = self._alive
        params = started.default_params if params is None else params
        params = validate_params(params, vocab_size=self.vocab_size)
        text, ids = self._tokenize(prompt, template_kwargs or {})
        ids = validate_prompt_ids(ids, self.vocab_size)
        max_tokens = validate_lengths(len(ids), params.max_tokens, started.max_model_len)
        capacity = started.core.space.capacity_of(params)
        if params.max_tokens is None:
            max_tokens = max(1, min(max_tokens, capacity + 1 - len(ids)))
        if len(ids) + max_tokens - 1 > capacity:
            raise CapacityError(
                f"{len(ids)} prompt tokens and {max_tokens} new ones need {len(ids) + max_tokens - 1} tokens of KV "
                f"memory, which holds {capacity} at this request's kv_floor",
                remedy="Raise kv_memory, lower max_tokens, or allow a narrower kv_floor",
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        return Submission(name, text, ids, params, max_tokens, seed, self._bad_word_ids(params), incremental)

    def _tokenize(self, prompt: object, template_kwargs: dict[str, Any]) -> tuple[str | None, list[Any]]:
        """The text of a prompt, if it has one, and its token ids, which are not checked yet."""
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], dict)):
            return None, prompt
        if not isinstance(prompt, str | list):
            remedy = "Give a string or a list of token ids"
            raise RequestError("not a prompt", field="prompt", value=prompt, remedy=remedy)
        if self.tokenizer is None:
            remedy = "Give a list of token ids"
            raise RequestError("this model has no tokenizer", field="prompt", value=prompt, remedy=remedy)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        text = self.tokenizer.apply_chat_template(prompt, **template_kwargs)
        return text, self.tokenizer.encode_chat(prompt, **template_kwargs)

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", field="bad_words", value=params.bad_words)
        return self.tokenizer.bad_word_ids(params.bad_words)

    def _run_all(self, submissions: list[Submission], show_bar: bool) -> list[RequestOutput]:
        """Submits all, waits for all; whatever interrupts the wait aborts what is left."""
        try:
            self._loop.submit(*submissions)
            return [_final(s) for s in _with_bar(submissions, show_bar)]
        except BaseException:
            for submission in submissions:
                self._loop.abort(submission.request_id)
            raise


def _snapshot(started: Started) -> EngineStats:
    core, space = started.core, started.core.space
    cache, counters = core.runner.cache, core.counters
    peak, fullest, ladder = cache.peak, cache.fullest, started.ladder
    held = fullest["codes"] + fullest["meta"] + fullest["dense"]
    idle = space.prefix.idle_nbytes if space.prefix else 0
    return EngineStats(
        model=started.name,
        device=str(started.device),
        dtype=str(started.dtype).removeprefix("torch."),
        kv=ladder.name,
        max_model_len=started.max_model_len,
        num_running=len(core.scheduler.running),
        num_waiting=len(core.scheduler.waiting),
        num_requests=counters.num_requests,
        num_finished=counters.num_finished,
        num_failed=counters.num_failed,
        num_refused=counters.num_refused,
        num_steps=counters.num_steps,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        num_preemptions=counters.num_preemptions,
        num_demotions=sum(cache.tables.num_demotions.values()),
        demotions={f"{old}->{new}": n for (old, new), n in cache.tables.num_demotions.items()},
        prefix_query_tokens=space.prefix.num_queried_tokens if space.prefix else 0,
        prefix_hit_tokens=space.prefix.num_hit_tokens if space.prefix else 0,
        kv_bytes_total=cache.nbytes,
        kv_bytes_used=cache.arena.used_nbytes - idle,
        kv_bytes_cached=idle,
        kv_bytes_peak=peak["codes"] + peak["meta"] + peak["dense"],
        kv_bytes_codes=peak["codes"],
        kv_bytes_meta=peak["meta"],
        kv_bytes_dense=peak["dense"],
        kv_blocks={ladder.rungs[rung].name: n for rung, n in cache.tables.num_blocks.items() if n and rung >= 0},
        kv_tokens_capacity=cache.tables.max_tokens(0),
        kv_tokens_floor=cache.tables.max_tokens(len(ladder.rungs) - 1),
        effective_bits=8 * held / fullest["elements"] if held else ladder.widest.effective_bits,
    )


class RequestStream(Iterator[RequestOutput]):
    """The outputs of one request as they come. ``close`` (or dropping it) aborts the request if it still runs."""

    def __init__(self, loop: EngineLoop, submission: Submission):
        self.request_id = submission.request_id
        self._loop, self._source = loop, submission.stream
        self._finished = False

    def __next__(self) -> RequestOutput:
        if self._finished:
            raise StopIteration
        output = self._source.get()
        assert output is not None
        self._finished = output.finished
        return output

    def close(self) -> None:
        if not self._finished:
            self._finished = True
            self._loop.abort(self.request_id)

    def __del__(self) -> None:
        self.close()


def _as_list(prompts: object) -> list[Any]:
    """``prompts`` as a list: one prompt, also one given as token ids, counts as a list of one."""
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Sequence):
        return [prompts]
    if all(isinstance(item, str | dict | Sequence) for item in prompts):
        return list(prompts)
    return [list(prompts)]


def _final(submission: Submission) -> RequestOutput:
    output = submission.stream.get()
    while output is None or not output.finished:
        output = submission.stream.get()
    return output


def _with_bar(submissions: list[Submission], show: bool) -> Iterator[Submission]:
    if not show:
        return iter(submissions)
    from rich.console import Console
    from rich.progress import track

    return iter(track(submissions, description="Requests", console=Console(stderr=True)))


__all__ = ["Engine", "RequestStream"]
