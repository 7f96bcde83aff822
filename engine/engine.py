"""``Engine``: the embedded interface. Blocking, streaming and async calls over one owner thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Never, overload

import torch

from .closable import Closable
from .config import EngineConfig, Fit, KVConfig, check_beside_fit
from .errors import EngineDeadError, RequestError
from .fit import fitted
from .intake import Conversation, Intake, Prompt, takes_long
from .metrics import EngineStats
from .presets import resolve_kv
from .progress_bar import with_bar
from .request import RequestOutput, SamplingParams
from .request_stream import RequestStream
from .resizing import resize
from .serving.loop import EngineLoop
from .serving.snapshot import take_snapshot
from .serving.submission import Submission
from .sleeping import sleep
from .started import Started
from .startup import start
from .text.tokenizer import Tokenizer
from .validation import check_name


class Engine(Closable):
    """A model, its KV memory and a scheduler, ready for requests from any thread or event loop.

    Raises ``ConfigError``, ``ModelError`` or ``CapacityError``, each naming the remedy.

    Model
        model: local folder or Hub id; with ``load_format="random"`` also a named shape; None is the demo model.
        revision: branch, tag or commit of a Hub model; None for its default branch.
        token: access token of the Hub; None for ``HF_TOKEN``.
        dtype: of activations: "float32", "bfloat16", "float16"; "auto" is the checkpoint's on a GPU, else float32.
        device: "cpu", "cuda" or "cuda:N"; "auto" is the first GPU, or the CPU without one.
        weights: "int8", "int4" or "fp8" quantizes linear layers and experts of a plain checkpoint while they are read.
        load_format: "auto" reads safetensors; "random" makes random weights of the model's shape.
        seed: of random weights, 0 to 2^63 - 1.

    KV memory
        kv: preset, path of a plan file (a ``Path``, or a string that ends in .json), or ``KVConfig``; None for "auto".
        state_dtype: of recurrent states of hybrids, such as "int16", or "float32,int16"; None for what ``kv`` says.
        kv_memory: bytes, a size such as "20GiB" or "4G", or a share of the memory that is free once the weights are
            loaded, such as 0.5 or "50%"; None for the default of docs/kv_cache.md.
        fit: a ``Fit``, which chooses ``weights``, ``kv``, ``kv_memory`` and ``max_model_len``; None for none.
        host_memory: bytes of the host, a size such as "32GiB", or a share of what is free there, in which cached
            prefixes and preempted requests sleep while KV memory is short; None for none.
        kv_store: folder in which cached prefixes outlive the engine; None for none. ``host_memory`` is by default as
            much as KV memory then, at most 4 GiB and a quarter of what is free.
        kv_store_size: the most that its files may take: bytes, a size, or a share of the disk's free room; None for
            "20GiB".
        kv_quota: share of KV memory, host memory and store that each tenant may use, in (0, 1]; None for no quotas.
        prefix_caching: keep full blocks for later requests that begin with the same tokens.
        resizable: let ``resize`` change KV memory of a GPU, by cuda-bindings; that of a CPU always can.

    Limits
        max_model_len: tokens of the longest request, prompt and output together; None for the model's own context,
            or what KV memory holds if that is less.
        extend_context: allow ``max_model_len`` beyond what the model was made for.
        max_num_seqs: requests that run at once, 1 to 4,096, raised to those of ``fit``; others wait.
        max_num_batched_tokens: tokens that one step computes, 1 to 1,048,576; longer prompts are computed in chunks.
        max_itl_ms: limit in milliseconds for the time between two tokens of a request, above 0 to 60,000, kept by
            smaller chunks of prompts, whose first tokens come later; None for no limit.

    Results
        deterministic: a request has the same tokens whatever runs beside it (docs/determinism.md), which takes more
            time; for ladders of one rung or an eager one, models without experts or states, and one GPU.

    Machine
        tensor_parallel: GPUs that share the model, 1 to 64, each a process with its part of the weights and of the KV
            heads; ``kv_memory`` is that of each. On a CPU processes of one machine.
        cuda_graphs: replay captured steps on a GPU; False saves their memory and makes small steps slower.
        warm_up: "lazy" captures a step on a GPU when its shape is met again; "full" captures all shapes that the limits
            allow at start, so that no request waits for a capture.
        num_threads: CPU threads of the engine's own thread, 1 to 1,024; None for torch's number, but for weights of up
            to 64 MiB for 4 at most, or for 1 while steps are faster so.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        kv: str | Path | KVConfig | None = None,
        state_dtype: str | None = None,
        kv_memory: int | str | float | None = None,
        host_memory: int | str | float | None = None,
        kv_store: str | PathLike[str] | None = None,
        kv_store_size: int | str | float | None = None,
        fit: Fit | None = None,
        kv_quota: float | None = None,
        prefix_caching: bool = True,
        resizable: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        extend_context: bool = False,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_itl_ms: float | None = None,
        deterministic: bool = False,
        tensor_parallel: int = 1,
        cuda_graphs: bool = True,
        warm_up: str = "lazy",
        num_threads: int | None = None,
        load_format: str = "auto",
        weights: str | None = None,
        revision: str | None = None,
        token: str | None = None,
        seed: int = 0,
    ):
        check_beside_fit(fit, {"kv": kv, "weights": weights, "kv_memory": kv_memory, "max_model_len": max_model_len})
        config = EngineConfig(
            model=model,
            kv=resolve_kv(kv, state_dtype),
            kv_memory=kv_memory,
            host_memory=host_memory,
            kv_store=kv_store,
            kv_store_size=kv_store_size,
            fit=fit,
            kv_quota=kv_quota,
            prefix_caching=prefix_caching,
            resizable=resizable,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            extend_context=extend_context,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_itl_ms=max_itl_ms,
            deterministic=deterministic,
            tensor_parallel=tensor_parallel,
            cuda_graphs=cuda_graphs,
            warm_up=warm_up,
            num_threads=num_threads,
            load_format=load_format,
            weights=weights,
            revision=revision,
            token=token,
            seed=seed,
        )
        self._started: Started | None = start(fitted(config))
        self._intake = Intake(self._started)
        workers, on_cpu = self._started.workers, self._started.device.type == "cpu"
        abandon = None if workers is None else workers.abandon
        self._loop = EngineLoop(self._started.core, self._started.threads if on_cpu else None, abandon)
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._loop.start()  # last: an interrupt above leaves no thread, and one here leaves a thread that is closed

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
        """Rows of the model's embedding; every token id is smaller."""
        return self._alive.config.vocab_size

    @property
    def default_params(self) -> SamplingParams:
        """Parameters of a request that names none: vLLM's defaults under the model's ``generation_config.json``."""
        return self._alive.default_params

    def params(self, **changes: Any) -> SamplingParams:
        """``default_params`` with ``changes``, such as ``engine.params(kv_floor="int8")``. Raises ``RequestError``.

        ``SamplingParams(kv_floor="int8")`` would begin at vLLM's defaults instead of the model's.
        """
        self._loop.check_alive()
        return self._intake.params(changes)

    def describe(self) -> list[str]:
        """Model, KV memory in tokens, concurrency and defaults taken from the model, a line each."""
        return list(self._alive.summary)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | Sequence[str] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts and returns one output each, in order; ``use_tqdm`` shows a bar, in notebooks, too.

        A prompt is a string, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. ``params`` are
        for all prompts, or a list with one each; ``request_id``, which ``abort`` takes, likewise. An invalid prompt or
        parameter raises ``RequestError`` before anything runs; a request that fails later has ``finish_reason``
        "error".
        """
        self._check_callable()
        return self._run_all(self._intake.completions(prompts, params, request_id), use_tqdm)

    @overload
    def chat(
        self,
        messages: str | Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | Sequence[str] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: str | Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | Sequence[str] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers a conversation through the model's chat template; several conversations give a list of outputs.

        A conversation is a list of messages, dicts with ``role`` and ``content``; a string is one user message.
        ``template_kwargs`` are variables of the template, such as ``{"enable_thinking": False}`` for Qwen3. Otherwise
        like ``generate``.
        """
        self._check_callable()
        submissions, are_many = self._intake.conversations(messages, params, request_id, template_kwargs)
        outputs = self._run_all(submissions, use_tqdm)
        return outputs if are_many else outputs[0]

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> RequestStream:
        """Submits a prompt or a conversation at once and iterates over its outputs, each with the new ``delta``.

        An async iterator and a context manager, too. Closing or dropping the iterator aborts the request.
        """
        self._loop.check_alive()
        submission = self._intake.streamed(prompt, params, request_id, template_kwargs)
        found = RequestStream(self, submission)  # before the request is submitted: an interrupt drops and so aborts it
        self._loop.submit([submission])
        return found

    async def generate_async(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like ``stream`` for ``async for``; cancelling the task or closing the generator aborts the request.

        Text is tokenized, a conversation rendered, and a grammar compiled in a thread of the event loop's executor.
        """
        self._loop.check_alive()
        given = prompt, params, request_id, template_kwargs
        if takes_long(prompt, params):
            submission = await asyncio.to_thread(self._intake.streamed, *given)
        else:
            submission = self._intake.streamed(*given)
        with RequestStream(self, submission) as stream:
            self._loop.submit([submission])
            async for output in stream:
                yield output

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment with ``finish_reason`` "abort"; an unknown or ended id is ignored."""
        self._loop.check_alive()
        self._loop.abort(check_name("request_id", request_id))

    def done(self, session: str, *, tenant: str = "") -> int:
        """Ends a conversation: its cached blocks that no other session has make room before all others.

        On host and disk, too. ``session`` and ``tenant`` are those of its requests, whose blocks count once they have
        ended. Returns the number of pieces, a sink or the tokens of a block; 0 for a session that is not known.
        """
        names = check_name("tenant", tenant), check_name("session", session)
        return self._loop.call(lambda: self._alive.core.space.done(*names))

    def stats(self) -> EngineStats:
        """A snapshot of load, memory and counters."""
        started = self._alive
        return self._loop.call(lambda: take_snapshot(started))

    def reset_stats(self) -> None:
        """Sets counters to zero and the peak to the memory in use now."""
        self._loop.call(self._alive.core.reset_counters)

    def resize(self, size: int | str | float, *, timeout: float | None = None) -> int:
        """Changes the size of KV memory while requests run; returns the bytes held, at most ``size`` of them.

        ``size`` is bytes, "4GiB", or a share of the ``kv_memory`` of the start, which is the most. Memory grows at
        once, and shrinks beside the steps: blocks step down and move, nobody is preempted. Returns after ``timeout``
        seconds while a shrink goes on. Raises ``CapacityError``, which names the smallest size possible now.
        """
        return resize(self._alive, self._loop, self._intake, size, timeout)

    def sleep(self, *, timeout: float | None = None) -> bool:
        """Gives the model's and all KV memory back until ``wake``; returns whether the engine sleeps.

        Requests that run wait, new ones too. What is cached moves to ``host_memory`` at the bits it has, as far as
        there is room; all else is computed again. Returns after ``timeout`` seconds while the step under way goes on.
        Raises ``ConfigError`` for an engine of several ranks.
        """
        return sleep(self._alive, self._loop, timeout)

    def wake(self) -> None:
        """Loads the model again, and goes on with the requests that wait; nothing happens if the engine is awake.

        Raises ``CapacityError`` where memory lacks now, ``ModelError`` for a checkpoint that was altered. The engine
        sleeps on then.
        """
        started = self._alive
        self._loop.call(lambda: started.waker.wake(started.core))

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._alive.core.sleeper.is_asleep

    def close(self) -> None:
        """Ends all requests, stops the thread and frees memory. May be called again."""
        self._finalizer()
        started, self._started = self._started, None  # once: another thread may close it, too
        if started is not None and started.workers is not None:
            started.workers.close()
        if started is not None and started.device.type == "cuda":
            with suppress(RuntimeError):  # of a lost device
                torch.cuda.empty_cache()
        if started is not None and started.tokenizer is not None:
            started.tokenizer.close()
        self._intake.close()

    def __repr__(self) -> str:
        started = self._started
        if started is None:
            return "<Engine, closed>"
        dtype = str(started.dtype).removeprefix("torch.")
        return f"<Engine {started.name} on {started.device} in {dtype}, kv={started.ladder.name!r}>"

    def __reduce__(self) -> Never:
        raise TypeError("an Engine cannot be pickled: make one in each process")

    @property
    def _alive(self) -> Started:
        started = self._started
        self._loop.check_alive()
        if started is None:
            raise EngineDeadError("the engine is closed", remedy="Make a new Engine")
        return started

    def _check_callable(self) -> None:
        """Raises ``EngineDeadError``, or ``RequestError`` in a finalizer that the engine's own thread runs."""
        self._loop.check_alive()
        if self._loop.is_own_thread:
            raise RequestError("the engine's own thread cannot wait for a request", remedy="Do it outside of __del__")

    def _run_all(self, submissions: list[Submission], show_bar: bool) -> list[RequestOutput]:
        """Submits all, waits for all; an interrupt of the wait aborts the requests that are left."""
        try:
            self._loop.submit(submissions)
            return [_final(submission) for submission in with_bar(submissions, show_bar)]
        except BaseException:
            for submission in submissions:
                self._loop.drop(submission)
            raise


def _final(submission: Submission) -> RequestOutput:
    output = submission.stream.get()
    while output is None or not output.finished:
        output = submission.stream.get()
    return output
