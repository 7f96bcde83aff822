"""The adapter for EleutherAI's lm-evaluation-harness: an engine as one of its language models.

Contexts are computed as prompts; the tokens of a continuation attend to the quantized cache, as generated ones do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qkv_engine.errors import ConfigError, RequestError
from qkv_engine.request import SamplingParams
from qkv_engine.validation import MAX_STOP_STRINGS

from .scoring import Pair, Score, ScoringEngine, max_pair_tokens, score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from qkv_engine.text.tokenizer import Tokenizer

MAX_GEN_TOKS = 256  # output tokens of a task that names no limit, as in the harness's own models
HARNESS_FIELDS = {"do_sample", "until", "max_gen_toks"}  # of generation options, that are no sampling parameters


class EngineLM(TemplateLM):
    """A language model of the harness whose requests an ``Engine`` computes, all of a kind at once.

    ``lowest_bits`` are the fewest of any block of any request so far.
    """

    def __init__(self, engine: ScoringEngine, *, name: str = "qkv-engine", show_progress: bool = False):
        """``name`` is the model's in the harness's caches. Raises ``ConfigError`` without a tokenizer or its tokens."""
        super().__init__()
        if engine.tokenizer is None:
            raise ConfigError("has no tokenizer to evaluate with", field="model", value=name)
        if engine.tokenizer.eos_token_id is None:
            raise ConfigError("has no end-of-sequence token", field="model", value=name)
        self.engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.lowest_bits: float | None = None
        self._name, self._show_progress = name, show_progress

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        assert self.tokenizer.eos_token_id is not None
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none: BOS, or the end of a text where there is no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    @property
    def max_length(self) -> int:
        """Tokens of the longest text, context included, that can be scored."""
        return max_pair_tokens(self.engine)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; with None for ``add_special_tokens`` the model's own, but no second BOS."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without a generation prompt the last message ends it."""
        variables = {"add_generation_prompt": add_generation_prompt}
        text = self.tokenizer.chat_prompt(chat_history, variables)[0]
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the longest context that follow one another without overlap."""
        pairs, counts = list[Pair](), list[int]()
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            found = [Pair(*make_disjoint_window(window)) for window in windows]
            pairs += found
            counts.append(len(found))
        scores = iter(self._score(pairs, disable_tqdm))
        totals = [sum(next(scores).logprob for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations of contexts, up to the first stop string; contexts lose their beginning where they are long."""
        asks = [self._ask(*request.args) for request in requests]
        outputs = self.engine.generate(
            [ids for ids, _, _ in asks],
            [params for _, params, _ in asks],
            use_tqdm=self._show_progress and not disable_tqdm,
        )
        texts = []
        for request, (_, _, until), output in zip(requests, asks, outputs, strict=True):
            if output.error is not None:
                raise RequestError(f"a continuation cannot be generated: {output.error}")
            self._note_bits(output.kv.lowest_bits)
            texts.append(postprocess_generated_text(output.text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitted(Pair(context, continuation)) for _, context, continuation in requests]
        results = [(one.logprob, one.is_greedy) for one in self._score(pairs, disable_tqdm)]
        for (key, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _fitted(self, pair: Pair) -> Pair:
        """``pair`` without the beginning of a context that is too long."""
        room = self.max_length - len(pair.continuation)
        if room < 1:
            raise RequestError(
                f"a continuation has {len(pair.continuation)} tokens",
                field="max_model_len",
                value=self.engine.max_model_len,
                remedy="Raise it, or leave the task out",
            )
        return pair._replace(context=pair.context[-room:])

    def _score(self, pairs: list[Pair], disable_tqdm: bool) -> list[Score]:
        scores = list(score(self.engine, pairs, use_tqdm=self._show_progress and not disable_tqdm))
        for one in scores:
            self._note_bits(one.lowest_bits)
        return scores

    def _note_bits(self, bits: float | None) -> None:
        if bits is not None:
            self.lowest_bits = bits if self.lowest_bits is None else min(bits, self.lowest_bits)

    def _ask(self, context: str, options: dict[str, Any]) -> tuple[list[int], SamplingParams, list[str]]:
        """A request of ``generate_until``: its prompt, its parameters, and all that ends its text."""
        given = normalize_gen_kwargs(options, MAX_GEN_TOKS)
        until = [text for text in handle_stop_sequences(given.get("until"), eos=None) if text]
        sampling = {"temperature": 0.0} | {name: given[name] for name in given.keys() - HARNESS_FIELDS}
        unknown = sorted(sampling.keys() - set(SamplingParams.__struct_fields__))
        if unknown:
            raise RequestError("not a sampling parameter", field=unknown[0], value=sampling[unknown[0]])
        room = self.engine.max_model_len - given["max_gen_toks"]
        if room < 1:
            remedy = f"Use at most {self.engine.max_model_len - 1}, or a larger max_model_len"
            value = given["max_gen_toks"]
            raise RequestError("leaves no room for a prompt", field="max_gen_toks", value=value, remedy=remedy)
        ids = self.tok_encode(context)[-room:]
        limits: dict[str, Any] = {"max_tokens": given["max_gen_toks"], "num_prefill_tokens": len(ids)}
        return ids, SamplingParams(stop=until[:MAX_STOP_STRINGS], **limits, **sampling), until
