"""Hybrids in the engine: states survive pressure, preemption, steps that break off, and other owners of their slots."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv_engine import ConfigError, Engine, ModelError, RequestOutput, SamplingParams
from qkv_engine.bench.filled import FilledEngine
from qkv_engine.config import EngineConfig
from qkv_engine.device.cpu.states import CpuStates
from qkv_engine.kernels.delta_net import StateSpec
from qkv_engine.kv.moves import MoveCommand
from qkv_engine.models.loader import find_model
from qkv_engine.presets import resolve_kv
from qkv_engine.serving.submission import Submission

from ..engine.test_command import Twin
from ..engine.test_run_ahead import begin, make_core, play
from .conftest import fill
from .test_engine_parity import assert_greedy, ragged_prompts, run_under_pressure
from .test_families import FAMILY_CASES, HYBRID, OWN_EXPERTS, load_for

HYBRIDS = [(family, changes) for family, changes in FAMILY_CASES if "linear_num_key_heads" in changes]
CASES = list(dict(HYBRIDS).items())
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SPEC = StateSpec(num_k_heads=2, num_v_heads=6, k_dim=12, v_dim=10, conv_width=4)


@pytest.fixture
def folder(saved: Callable[..., transformers.PreTrainedModel], tmp_path: Path) -> Path:
    """A Qwen3.5 checkpoint with three layers of states and one of attention."""
    saved("Qwen3_5", HYBRID)
    return tmp_path


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, kv="fp32", kv_memory="8MiB", device="cpu", max_num_batched_tokens=48) as engine:
        yield engine


def prompts(number: int, seed: int = 0, most: int = 150) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 97) for _ in range(rng.randint(1, most))] for _ in range(number)]


def answers(engine: Engine, work: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(work, GREEDY)]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_greedy_tokens_equal_transformers_through_preemptions(
    family: str,
    changes: dict[str, Any],
    saved: Callable[..., transformers.PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    reference = saved(family, changes)
    config = find_model(str(tmp_path)).config
    block = config.num_layers * 2 * 2 * 128 * 20 * 4
    states = sum(spec.nbytes(torch.float32) for spec in config.states)
    outputs = run_under_pressure(str(tmp_path), ragged_prompts(97), block + states // 2)
    for output in outputs:
        assert_greedy(reference, output, 75)


def test_blocks_step_down_beside_states_that_stay(folder: Path) -> None:
    work = prompts(8, most=400)
    with Engine(folder, kv="auto", kv_memory="256KiB", device="cpu", max_num_batched_tokens=48) as engine:
        outputs = engine.generate(work, GREEDY)
        stats = engine.stats()
        assert stats.num_demotions and not any(output.error for output in outputs)
        assert stats.kv_bytes_used == 0
        engine._started.core.space.tables.check_integrity()


@pytest.fixture
def forgetful(folder: Path) -> Iterator[Engine]:
    """Without a prefix cache, so that nothing is left of requests that have ended."""
    options: dict[str, Any] = {"kv": "fp32", "kv_memory": "8MiB", "device": "cpu", "max_num_batched_tokens": 48}
    with Engine(folder, prefix_caching=False, **options) as engine:
        yield engine


def test_a_request_holds_a_slot_for_each_layer_with_a_state(forgetful: Engine) -> None:
    engine, core = forgetful, forgetful._started.core
    tables, ladder = core.space.tables, engine._started.ladder
    nbytes = SPEC.nbytes(torch.float32)
    assert ladder.states == (SPEC,) * 3 and [len(group.layers) for group in ladder.groups] == [1]
    assert tables.demand(1, 0)[nbytes] == 3
    peak: list[int] = []
    note = core.registry.report

    def look(*submissions: Any) -> None:
        peak.append(tables.arena.live[nbytes])
        note(*submissions)

    core.registry.report = look
    work = prompts(5)
    first, again = answers(engine, work), answers(engine, work)
    assert first == again and max(peak) == 15 and not tables.arena.used_nbytes
    assert core.runner.cache.peak["state"] == 15 * nbytes


def test_twice_as_many_requests_do_not_fit_in_memory_full_of_states(folder: Path) -> None:
    """Admission counts states: nobody is preempted for them."""
    nbytes = 3 * SPEC.nbytes(torch.float32)
    with Engine(folder, kv="fp32", kv_memory=24 * nbytes, device="cpu", max_model_len=128) as engine:
        core = engine._started.core
        most, running = core.space.tables.max_requests(50, 0), 0
        schedule = core.scheduler.schedule

        def watched() -> Any:
            nonlocal running
            batch = schedule()
            running = max(running, len(core.scheduler.running))
            return batch

        core.scheduler.schedule = watched
        assert len(answers(engine, [[7] * 10] * 40)) == 40
        assert most // 2 < running <= most < 24 and not engine.stats().num_preemptions


def run(engine: Engine, work: list[list[int]], broken: Callable[..., Any], patch: pytest.MonkeyPatch) -> Any:
    with patch.context() as patched:
        patched.setattr(CpuStates, "delta_net", broken)
        return engine.generate(work, GREEDY)


def test_steps_that_break_off_between_two_states_leave_no_trace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, compute = prompts(12), CpuStates.delta_net
    expected, calls = answers(engine, work), 0

    def broken(self: CpuStates, layer: int, *rest: Any) -> Tensor:
        nonlocal calls
        out, calls = compute(self, layer, *rest), calls + 1
        if calls % 50 == 0:
            raise KeyError("injected")
        return out

    outputs = run(engine, work, broken, monkeypatch)
    assert calls > 200 and [output.token_ids for output in outputs] == expected


def test_a_request_that_breaks_steps_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    work, compute = prompts(6), CpuStates.delta_net
    expected, at_fault = answers(engine, work), work[2]
    core = engine._started.core

    def broken(self: CpuStates, layer: int, *rest: Any) -> Tensor:
        out = compute(self, layer, *rest)
        running = [request for request in core.scheduler.running if request.prompt_token_ids == at_fault]
        if layer == 1 and any(request.num_output_tokens > 3 for request in running):
            raise KeyError("injected")
        return out

    outputs = run(engine, work, broken, monkeypatch)
    assert outputs[2].finish_reason == "error"
    assert [o.token_ids for i, o in enumerate(outputs) if i != 2] == expected[:2] + expected[3:]
    assert answers(engine, work) == expected


def test_chunks_that_begin_requests_are_run_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states began with zeros: nothing that they overwrote is missed."""
    work, compute = [[7] * 20, [9] * 20], CpuStates.delta_net
    expected, faults = answers(engine, work), 0

    def broken(self: CpuStates, layer: int, *rest: Any) -> Tensor:
        nonlocal faults
        out = compute(self, layer, *rest)
        if layer and not faults:
            faults += 1
            raise KeyError("injected")
        return out

    monkeypatch.setattr(engine._started.core.recovery, "restart", lambda isolate: pytest.fail("everything is computed"))
    outputs = run(engine, work, broken, monkeypatch)
    assert faults and [output.token_ids for output in outputs] == expected


def submissions(work: list[list[int]], stops: dict[int, list[int]], floor: int = 0) -> list[Submission]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=stops.get(i))
        for i in range(len(work))
    ]
    return [
        Submission(f"r{i}", None, ids, each, 30, 0, [], False, floor=floor)
        for i, (ids, each) in enumerate(zip(work, params, strict=True))
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_tokens_of_steps_ahead_that_are_dropped_harm_no_other_state(folder: Path) -> None:
    """Requests stop while the step ahead computes their next token; their slots go to those that wait."""
    options: dict[str, Any] = {"model": str(folder), "max_num_seqs": 4, "max_model_len": 300}
    started = begin("fp32", "2MiB", **options)
    work = prompts(14, seed=3)
    plain = tokens(play(make_core(started, False), submissions(work, {}), {}))
    stops = {i: [plain[i][5 + i]] for i in range(0, 14, 2)}
    expected = tokens(play(make_core(started, False), submissions(work, stops), {}))
    core = make_core(started, True)
    assert tokens(play(core, submissions(work, stops), {})) == expected
    assert core.runner.num_ahead > 100  # type: ignore[attr-defined]


def test_commands_carry_where_states_are(folder: Path) -> None:
    started = begin("auto", "256KiB", model=str(folder), max_model_len=400)
    core, runner = started.core, started.core.runner
    twin = Twin(runner)
    runner.backend = twin  # type: ignore[assignment]
    outputs = play(core, submissions(prompts(20, seed=2, most=300), {}, started.ladder.last), {20: "r3"})
    assert not any(output.error for output in outputs) and twin.num_groups and twin.num_gone_on


def test_two_ranks_give_the_tokens_of_one(saved: Callable[..., Any], tmp_path: Path) -> None:
    """Each has the states of its heads, at equal addresses."""
    saved("Qwen3_5", HYBRID | {"intermediate_size": 88})
    with pytest.raises(ConfigError, match="2 key heads of states"):
        find_model(str(tmp_path)).config.check_ranks(4)
    work, found = prompts(6), []
    for size in (1, 2):
        options: dict[str, Any] = {"kv": "fp32", "kv_memory": f"{1024 // size}KiB", "num_threads": 1}
        with Engine(tmp_path, tensor_parallel=size, device="cpu", max_num_batched_tokens=48, **options) as engine:
            found.append(answers(engine, work))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_vision_and_drafts_of_a_checkpoint_are_skipped(
    family: str, logits_of: Callable[..., Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint as it is on the Hub: text beside vision, experts stacked, layers that predict further tokens."""
    torch.manual_seed(0)
    changes = HYBRID | (OWN_EXPERTS | {"moe_intermediate_size": 23} if family.endswith("Moe") else {})
    text = getattr(transformers, f"{family}TextConfig")(**changes).to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 60}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
    config._experts_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    fill(reference)
    reference.save_pretrained(tmp_path)
    state = {name: x.clone() for name, x in reference.state_dict().items()}
    save_file(
        state | {"mtp.fc.weight": torch.zeros(3), "mtp.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors"
    )
    with caplog.at_level(logging.INFO, logger="qkv_engine"):
        loaded = load_for(tmp_path)
    for word in ("vision", "multi-token prediction"):
        assert len([record for record in caplog.records if word in record.message]) == 1
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = reference(input_ids=ids[None]).logits[0].log_softmax(-1)
    assert (logits_of(loaded, ids).log_softmax(-1) - theirs).abs().max() < 3e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["linear_attention"] * 4),
        ("layer_types", ["sliding_attention", "full_attention"] * 2),
        ("linear_num_value_heads", 5),
        ("linear_conv_kernel_dim", 1),
        ("hidden_act", "gelu_pytorch_tanh"),
        ("attn_output_gate", False),
    ],
)
def test_what_states_cannot_be_is_refused(field: str, value: object) -> None:
    from qkv_engine.models.registry import config_from_hf

    with pytest.raises(ModelError, match=field):
        config_from_hf({"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **HYBRID, field: value})


def test_a_tensor_of_a_state_layer_that_is_missing_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.linear_attn.A_log"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.1\.linear_attn\.A_log"):
        load_for(folder)


def test_a_filled_prompt_goes_on_from_empty_states(folder: Path) -> None:
    """As ``qkv-engine bench`` fills prompts in place of computing them."""
    config = EngineConfig(model=str(folder), kv=resolve_kv("fp32"), kv_memory="4MiB", device="cpu", max_model_len=400)
    with FilledEngine(config) as engine:
        engine.begin([200, 77], 300)
        assert engine.seconds_per_step(12) > 0
        assert [request.num_computed_tokens for request in engine.running] == [212, 89]
        engine.end()


def test_states_move_while_memory_shrinks(folder: Path) -> None:
    """Requests that end leave holes; the states of the others go there, and their tokens stay the same."""
    started = begin("fp32", "3MiB", model=str(folder), max_model_len=300, prefix_caching=False)
    core, moved = started.core, 0
    work = prompts(12, seed=5, most=60)
    expected = tokens(play(core, submissions(work, {}), {}))
    nbytes, move = SPEC.nbytes(torch.float32), core.runner.backend.move

    def watched(command: MoveCommand) -> Any:
        nonlocal moved
        moved += sum(len(launch.src) for wave in command.waves for launch in wave.launches if launch.nbytes == nbytes)
        return move(command)

    core.runner.backend.move = watched  # type: ignore[method-assign]
    load = submissions(work, {i: [expected[i][4]] for i in range(0, 12, 2)})
    for submission in load:
        core.live[submission.request_id] = submission
        core.add(submission)
    step = 0
    while core.has_work:
        core.step()
        step += 1
        if step == 24:
            core.resize(11 * 2**15)
    found = [submission.stream.get(0).token_ids for submission in load]
    assert moved and found[1::2] == expected[1::2]
    core.space.tables.check_integrity()
