"""The harness gets from an engine what it gets from its own Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from qkv_engine import ConfigError, Engine, Logprob, RequestError, SamplingParams
from qkv_engine.loading import demo_folder
from qkv_engine.request import CompletionOutput, RequestMetrics, RequestOutput

from .harness_tasks import BODIES, write_tasks

if TYPE_CHECKING:  # seconds, which whoever only collects the tests does not need
    from lm_eval.api.instance import Instance

    from qkv_engine.bench.lm_eval import EngineLM


class Recorder:
    """An engine that notes what it is asked and gives every token a log-probability of -1."""

    def __init__(self, tokenizer: Any, max_model_len: int = 64, error: str | None = None):
        self.tokenizer, self.max_model_len, self.error = tokenizer, max_model_len, error
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        self.prompts += prompts
        self.params += params
        return [
            RequestOutput(
                request_id="r",
                prompt=None,
                prompt_token_ids=ids,
                outputs=[CompletionOutput(index=0, text="one stop two")],
                finished=True,
                metrics=RequestMetrics(),
                prompt_logprobs=[None, *({token: Logprob(-1.0, 1 + token % 2)} for token in ids[1:])],
                error=self.error,
            )
            for ids in prompts
        ]

    def stats(self) -> Any: ...

    def reset_stats(self) -> None: ...


def engine_lm(engine: Any, **options: Any) -> EngineLM:
    from qkv_engine.bench.lm_eval import EngineLM

    return EngineLM(engine, **options)


def instances(kind: str, *args: tuple[Any, ...]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in args]


def responses(lm: Any, folder: Path) -> dict[str, list[Any]]:
    """What ``lm`` answered to each question, by task."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(lm, tasks=list(BODIES), task_manager=manager, bootstrap_iters=10)
    assert found is not None
    return {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}


@pytest.mark.slow
def test_the_same_as_the_harness_with_hugging_face(tmp_path: Path):
    from lm_eval.models.huggingface import HFLM

    folder = write_tasks(tmp_path)
    expected = responses(HFLM(pretrained=str(demo_folder()), device="cpu", dtype="float32"), folder)
    with Engine(kv="fp32", kv_memory="64MiB", max_model_len=1024, prefix_caching=False) as engine:
        found = responses(engine_lm(engine), folder)
    assert found["demo_generate"] == expected["demo_generate"]
    theirs, ours = (
        [answer for question in answers["demo_choice"] for (answer,) in question] for answers in (expected, found)
    )
    assert len(ours) == 6
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert any(greedy for _, greedy in ours) and not all(greedy for _, greedy in ours)
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], rel=1e-4, abs=1e-5)
    theirs, ours = ([total for ((total,),) in answers["demo_rolling"]] for answers in (expected, found))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_contexts_are_prompts_and_continuations_are_scored(demo_engine: Engine):
    engine = Recorder(demo_engine.tokenizer)
    lm = engine_lm(engine)
    (first, second) = lm.loglikelihood(instances("loglikelihood", ("Sue has", " 12"), ("", "Sue")))
    encode = lm.tok_encode
    whole = encode("Sue has 12")
    assert engine.prompts == [whole, [lm.eot_token_id, *encode("Sue")]]
    assert [params.num_prefill_tokens for params in engine.params] == [len(encode("Sue has")), 1]
    scored = whole[len(encode("Sue has")) :]
    assert first == (-len(scored), all(token % 2 == 0 for token in scored))
    assert second[0] == -len(encode("Sue"))


def test_a_long_context_loses_its_beginning_and_a_long_continuation_is_refused(demo_engine: Engine):
    engine = Recorder(demo_engine.tokenizer)
    lm = engine_lm(engine)
    lm._loglikelihood_tokens([(("", ""), list(range(100)), [7, 8, 9])])
    assert engine.prompts == [[*range(40, 100), 7, 8, 9]]
    assert engine.params[0].num_prefill_tokens == 60
    with pytest.raises(RequestError, match="max_model_len=64: a continuation has 63 tokens"):
        lm._loglikelihood_tokens([(("", ""), [1], [7] * 63)])


def test_rolling_windows_score_every_token_once(demo_engine: Engine):
    engine = Recorder(demo_engine.tokenizer)
    text = "Sue has 12. " * 40
    num_tokens = len(demo_engine.tokenizer.encode(text))
    assert engine_lm(engine).loglikelihood_rolling(instances("loglikelihood_rolling", (text,), ("Sue",))) == [
        -num_tokens,
        -len(demo_engine.tokenizer.encode("Sue")),
    ]
    assert max(map(len, engine.prompts)) == 63 and num_tokens > 126


def test_generation_options(demo_engine: Engine):
    engine = Recorder(demo_engine.tokenizer)
    options = {"until": ["stop", ""], "max_gen_toks": 9, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    texts = engine_lm(engine).generate_until(
        instances("generate_until", ("Sue has 12. " * 40, options), ("Sue", {"until": "two", "max_gen_toks": 9}))
    )
    assert texts == ["one ", "one stop "]
    sampled, greedy = engine.params
    assert (sampled.temperature, sampled.top_p, sampled.max_tokens, sampled.stop) == (0.5, 0.9, 9, ["stop"])
    assert (greedy.temperature, greedy.stop) == (0.0, ["two"])
    assert len(engine.prompts[0]) == 64 - 9


@pytest.mark.parametrize(
    ("options", "field"), [({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 64}, "max_gen_toks")]
)
def test_generation_options_that_cannot_be(options: dict[str, Any], field: str, demo_engine: Engine):
    with pytest.raises(RequestError) as caught:
        engine_lm(Recorder(demo_engine.tokenizer)).generate_until(instances("generate_until", ("Sue", options)))
    assert caught.value.field == field


def test_a_request_that_fails_is_an_error(demo_engine: Engine):
    lm = engine_lm(Recorder(demo_engine.tokenizer, error="not finite"))
    with pytest.raises(RequestError, match="not finite"):
        lm.generate_until(instances("generate_until", ("Sue", {"max_gen_toks": 5})))
    with pytest.raises(RequestError, match="not finite"):
        lm.loglikelihood(instances("loglikelihood", ("Sue", " has")))


def test_conversations(demo_engine: Engine):
    lm = engine_lm(Recorder(demo_engine.tokenizer), name="a/b")
    user = {"role": "user", "content": "Hello"}
    assert lm.apply_chat_template([user]).endswith("assistant\n")
    begun = lm.apply_chat_template([user, {"role": "assistant", "content": "The answer is "}], False)
    assert begun.endswith("assistant\nThe answer is")
    assert lm.chat_template(True) == demo_engine.tokenizer.chat_template
    assert lm.tokenizer_name == "a__b"


def test_a_model_without_its_tokens_is_refused():
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine_lm(Recorder(None))
    with pytest.raises(ConfigError, match="no end-of-sequence"):
        engine_lm(Recorder(SimpleNamespace(eos_token_id=None, bos_token_id=None)))
