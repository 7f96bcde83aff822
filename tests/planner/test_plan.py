"""Plan files: what is written is read again, what is damaged is refused by name, what is served fits the model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv_engine import ConfigError, Engine, KVConfig, SamplingParams
from qkv_engine.config import BasesFile
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.loading import demo_folder
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.loader import read_config
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.plan_file import _refuse_repeats, load_plan, plan_bytes
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.plan import KVPlan, Settings, read_plan
from qkv_engine.planner.pm_kvq import PMKVQ
from qkv_engine.presets import resolve_kv

from ..models.tiny import WEIGHTS, write_tiny
from .profiles import made_up_profile


def plan_for(folder: Path, settings: Settings | None = None) -> KVPlan:
    """A plan for the model in ``folder``, its profile made up."""
    config = read_config(folder)
    model = ModelFingerprint.of(folder.name, config, weights_digest(folder))
    return KVPlan.make(settings or KVmix(share=0.5, recent_ratio=0.2), made_up_profile(config), model)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


@pytest.fixture
def file(model: Path, tmp_path: Path) -> Path:
    """A plan file for ``model``."""
    path = tmp_path / "mine.json"
    path.write_bytes(plan_bytes(plan_for(model)))
    return path


@pytest.fixture
def edit(file: Path) -> Callable[[Callable[[Any], object]], Path]:
    """The plan file after a change of its contents."""

    def change(how: Callable[[Any], object]) -> Path:
        contents = json.loads(file.read_text())
        how(contents)
        file.write_text(json.dumps(contents))
        return file

    return change


def test_a_plan_is_read_as_it_was_written(model: Path, file: Path):
    assert read_plan(file) == plan_for(model)
    lines = file.read_text().splitlines()
    assert '      "k": [0.333333, 0.666667],' in lines  # a list is one line
    kv = resolve_kv(str(file))
    assert kv == resolve_kv(file) == load_plan(file) and isinstance(kv, KVConfig)
    assert (kv.name, kv.eager, kv.sink, kv.recent_ratio) == ("mine", True, 0, 0.2)
    assert kv.rungs[1].k == ("int2-channel-32", "int3-channel-32")


def test_the_home_folder_is_found(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert resolve_kv("~/mine.json").name == "mine"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda plan: plan.pop("version"), "version"),
        (lambda plan: plan.update(version=1), r"version is 1.*reads 2"),
        (lambda plan: plan.update(version="1"), "version"),
        (lambda plan: plan["settings"].update(method="kvmax"), "settings.method"),
        (lambda plan: plan["settings"].update(method="pm-kvq"), "settings"),
        (lambda plan: plan.update(extra=1), "extra"),
        (lambda plan: plan.pop("ladder"), "ladder"),
        (lambda plan: plan["model"].pop("head_dim"), r"head_dim.*model"),
        (lambda plan: plan["model"].update(num_layers="2"), "num_layers"),
        (lambda plan: plan["model"].update(num_layers=3), r"profile.scores.k has 2 entries for 3 layers"),
        (lambda plan: plan["profile"]["scores"]["v"].pop(), r"scores.v has 1 entries"),
        (lambda plan: plan["profile"]["scores"]["v"].__setitem__(0, None), "scores.v"),
        (lambda plan: plan["settings"].update(share=2), "share"),
        (lambda plan: plan["settings"].update(shares=0.2), "shares"),
        (lambda plan: plan["ladder"].update(sink=3), "sink"),
        (lambda plan: plan["ladder"].update(recent=-1), "recent"),
        (lambda plan: plan["ladder"].update(recent_ratio=1), "recent_ratio"),
        (lambda plan: plan["ladder"].update(eager=0), "eager"),
        (lambda plan: plan["ladder"].update(rungs=[]), "0 rungs"),
        (lambda plan: plan["ladder"]["rungs"].append(plan["ladder"]["rungs"][0]), "one name"),
        (lambda plan: plan["ladder"]["rungs"][1].update(k=["int2-channel-32"]), r"kvmix.k has 1 entries"),
        (lambda plan: plan["ladder"]["rungs"][1].update(v=[1, 2]), "rungs"),
        (lambda plan: plan["ladder"]["rungs"][1].update(name="\n"), "rung"),
        (lambda plan: plan["profile"]["prompts"].update(count=-1), "count"),
        (lambda plan: plan["profile"]["sensitivities"]["k"].update(dense16=[0]), r"sensitivities.k.dense16 has 1 entr"),
        (lambda plan: plan["profile"]["sensitivities"]["v"].update(dense16=[0, -1]), r"dense16|sensitivities.v"),
        (lambda plan: plan["profile"].update(key_scale=[[[1.0] * 8]] * 3), "key_scale is not of 2 layers, 1 heads"),
        (lambda plan: plan["profile"].update(key_scale=[[[0.0] * 8]] * 2), "key_scale"),
        (lambda plan: plan["profile"].update(position_scale=0), "position_scale"),
        (lambda plan: plan["profile"].update(key_scale=[[]] * 2), "key_scale is not of .* 1 heads"),
        (lambda plan: plan["profile"].update(key_scale=[[[1.0] * 8] * 2] * 2), "key_scale is not of .* 1 heads"),
        (lambda plan: plan["profile"].update(key_scale=[[[1.0] * 7]] * 2), "key_scale is not of .* 8 pairs"),
        (
            lambda plan: plan["profile"]["sensitivities"]["k"].update({f"x{i}": [0, 0] for i in range(257)}),
            r"length <= 256 - at `\$.profile.sensitivities.k",
        ),
        (lambda plan: plan["profile"]["scores"].update(k=[1, -1]), r"scores.k\[1\]"),
    ],
)
def test_a_changed_field_is_named(how: Callable, message: str, edit: Callable):
    with pytest.raises(ConfigError, match=rf"(?s)kv='.*mine.json'.*{message}.*qkv-engine plan"):
        read_plan(edit(how))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"version": 1}',
        b"[" * 100_000,
        b'{"version": 1e999}',
        b'{"version": 99999999999999999999}',
        b"x" * 5 * 2**20,
    ],
    ids=len,
)
def test_no_plan_is_refused(data: bytes, file: Path):
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"kv='.*mine.json'"):
        read_plan(file)


def test_truncated_anywhere_or_with_a_byte_changed_it_is_refused_or_a_plan(file: Path):
    whole, rng = file.read_bytes(), random.Random(0)
    for _ in range(100):
        file.write_bytes(whole[: rng.randrange(len(whole) - 2)])
        with pytest.raises(ConfigError):
            read_plan(file)
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            load_plan(file)
        except ConfigError:
            continue


def test_what_is_no_readable_file_is_refused(tmp_path: Path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path, message in (
        (tmp_path / "none.json", "cannot be read: No such file"),
        (tmp_path, "not a regular file"),
        (pipe, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        ("a\0.json", "not a path"),
        ("x" * 5000 + ".json", "File name too long"),
    ):
        with pytest.raises(ConfigError, match=rf"kv=.*: {message}.*\. Give the path of a file of at most 4.0 MiB"):
            load_plan(path)


@pytest.mark.parametrize("repeat", ['"sink": 32, "sink"', '"version": 2, "version"'])
def test_a_key_that_is_there_twice_is_refused(repeat: str, file: Path):
    key = repeat.rsplit(maxsplit=1)[1]
    file.write_text(file.read_text().replace(key, repeat))
    with pytest.raises(ConfigError, match=rf"kv='.*mine.json'.*key '{key[1:-1]}' twice"):
        read_plan(file)


def test_looking_for_repeats_takes_time_in_proportion_to_the_keys():
    _refuse_repeats([(str(i), 0) for i in range(200_000)])  # pair by pair it takes minutes


@pytest.mark.parametrize(
    "how",
    [
        lambda plan: plan.update({"x" * 10**6: 1}),
        lambda plan: plan["ladder"]["rungs"][1].update(name="x" * 10**6, k=[]),
        lambda plan: plan["model"].update(name="x" * 10**6, architecture="y" * 10**6),
    ],
)
def test_a_long_name_does_not_flood_the_message(how: Callable, edit: Callable, model: Path):
    with pytest.raises(ConfigError) as refusal:
        load_plan(edit(how)).model.check_shape(read_config(model), "mine")
    assert len(str(refusal.value)) < 1000


def test_a_file_name_that_cannot_be_shown_is_refused(file: Path):
    with pytest.raises(ConfigError, match=r"kv='.*a\\nb.json'.*Rename the file"):
        load_plan(file.rename(file.with_name("a\nb.json")))


def test_a_plan_names_the_bases_beside_it(edit: Callable, model: Path):
    assert load_plan(edit(lambda plan: plan["profile"].pop("bases", None))).bases is None  # as plans of older releases
    path = edit(lambda plan: plan["profile"].update(bases="a1" * 32))
    place = str(path.with_name("mine.bases.safetensors"))
    assert load_plan(path).bases == BasesFile(place, "a1" * 32) and read_plan(path).profile.bases == "a1" * 32
    with pytest.raises(ConfigError, match=r"kv='.*mine.bases.safetensors'.*No such file.*qkv-engine plan"):
        Engine(str(model), kv=path)


@pytest.mark.parametrize("method", ["kvmix", "pm-kvq", "mixed"])
def test_a_method_without_a_plan_names_the_command(method: str):
    with pytest.raises(ConfigError, match=rf"kv='{method}'.*qkv-engine plan MODEL --method {method} -o plan.json"):
        resolve_kv(method)


@pytest.mark.parametrize("method", [Mixed, PMKVQ])
def test_solved_plans_are_read_as_they_were_written(method: type[Settings], model: Path, tmp_path: Path):
    settings = method(budget="6bits", context=8192)
    plan = plan_for(model, settings)
    path = tmp_path / "solved.json"
    path.write_bytes(plan_bytes(plan))
    assert read_plan(path) == plan and read_plan(path).settings == settings
    assert load_plan(path).rungs == plan.config("solved").rungs


def test_the_engine_reads_a_plan_without_the_planner_and_torch(file: Path):
    code = f"""
import sys
from qkv_engine.plan_file import load_plan
assert load_plan({str(file)!r}).key_scale is None
assert not [name for name in sys.modules if name.split(".")[0] == "torch" or "planner" in name]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda plan: plan.update(extra=1), "extra"),
        (lambda plan: plan.pop("settings"), "settings"),
        (lambda plan: plan["profile"].pop("key_scale"), "key_scale"),
        (lambda plan: plan["profile"].update(key_scale=[[[0.0] * 8]] * 2), "key_scale"),
        (lambda plan: plan["profile"].update(key_scale=[[[1.0] * 8]] * 3), "key_scale is not of 2 layers, 1 heads"),
        (lambda plan: plan["ladder"]["rungs"][1].update(k=["int2-channel-32"]), r"kvmix.k has 1 entries"),
        (lambda plan: plan["profile"].update(bases="A1" * 32), "profile.bases"),
        (lambda plan: plan["ladder"].update(sink=3), "sink"),
    ],
)
def test_the_engine_checks_what_it_reads(how: Callable, message: str, edit: Callable):
    with pytest.raises(ConfigError, match=rf"(?s)kv='.*mine.json'.*{message}.*qkv-engine plan"):
        resolve_kv(edit(how))


def test_what_only_the_planner_reads_is_not_the_engines_matter(edit: Callable):
    path = edit(lambda plan: plan["settings"].update(method="of another release"))
    assert resolve_kv(path).rungs[1].name == "kvmix"
    with pytest.raises(ConfigError, match=r"settings.method"):
        read_plan(path)


def test_unknown_names_mention_plans():
    with pytest.raises(ConfigError, match=r"kv='plan'.*bf16.*path of a plan"):
        resolve_kv("plan")


# ---- with a model


def test_an_engine_serves_a_plan(tmp_path: Path):
    path = tmp_path / "demo plan.json"
    path.write_bytes(plan_bytes(plan_for(demo_folder(), KVmix())))
    with Engine(kv=path, kv_memory="64MiB") as engine:
        (output,) = engine.generate([list(range(5, 400))], SamplingParams(max_tokens=4, temperature=0))
        assert engine.stats().kv == "demo plan"
        assert output.kv.blocks.get("kvmix", 0) >= 2 and output.kv.lowest_bits == 2


def test_blocks_pass_through_the_rungs_of_a_plan_under_pressure(tmp_path: Path):
    """Layers of which some are dense and some have codes, side by side in one block."""
    path = tmp_path / "mixed.json"
    path.write_bytes(plan_bytes(plan_for(demo_folder(), Mixed(budget="3.5bits", context=8192, rungs=12))))
    rungs = load_plan(path).rungs
    assert any("dense16" in rung.k and len(set(rung.k)) > 1 for rung in rungs)
    prompts = [[5 + (n * step) % 900 for n in range(700)] for step in (1, 3, 7, 11, 13, 17)]
    with Engine(kv=path, kv_memory="24MiB", max_model_len=1024) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        demotions = engine.stats().demotions
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
    assert len(demotions) >= 4 and {step.split("->")[1] for step in demotions} <= {rung.name for rung in rungs[1:]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "num_layers is 2 there and 3 here"),
        ({"hidden_size": 64}, "head_dim is 16 there and 32 here"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 32}, "num_kv_heads"),
    ],
)
def test_a_plan_for_another_shape_is_refused(changes: dict, message: str, file: Path, tmp_path: Path):
    other = write_tiny(tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match=rf"kv='mine'.*another model \(model\): {message}.*qkv-engine plan"):
        Engine(str(other), kv=str(file), kv_memory="16MiB")


def test_a_plan_for_other_weights_is_refused(model: Path, file: Path):
    tensors = load_file(model / WEIGHTS)
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 3] += 0.1
    save_file(tensors, model / WEIGHTS)
    with pytest.raises(ConfigError, match="the weights differ"):
        Engine(str(model), kv=file, kv_memory="16MiB")


def test_random_weights_may_use_any_plan_of_their_shape(model: Path, file: Path):
    Engine(str(model), kv=file, load_format="random", kv_memory="16MiB").close()


def test_the_digest_is_that_of_the_bfloat16_copy(model: Path):
    before = weights_digest(model)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(tensors, model / WEIGHTS)
    assert weights_digest(model) == before != weights_digest(demo_folder())


def test_the_digest_of_plain_weights_stays():
    """Plans that were made keep their weights."""
    assert weights_digest(demo_folder()) == "a1ae3d7b50cea464696f58201e2a23af0fc7bd0930cb6d6989eec30d2c1c6d14"


def test_formats_that_do_not_fit_the_model_are_refused(model: Path, edit: Callable):
    path = edit(lambda plan: plan["ladder"]["rungs"][1].update(k="int5-channel-32"))
    with pytest.raises(ConfigError, match=r"^kv='mine': format='int5-channel-32'.*Choose from"):
        Engine(str(model), kv=path, kv_memory="16MiB")


DENSE = ("dense16", "dense16")


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ([("int8-channel-128", "int8-token-128"), DENSE], "the first rung must be dense.*Begin"),
        ([DENSE, ("int2-channel-32",) * 2, ("int8-channel-32",) * 2], "not smaller than.*fewer bits"),
        (
            [DENSE, ("int8-channel-32", "int1-token-32"), ("int1-channel-32", "int2-token-32")],
            "V of layer 0 grows.*fewer",
        ),
        ([DENSE, ("kitty-12.5", "kitty-12.5")], "V of layer 0.*Choose a format per token"),
    ],
)
def test_impossible_ladders_name_the_plan(formats: list, message: str, model: Path, edit: Callable):
    rungs = [{"name": f"rung {number}", "k": k, "v": v} for number, (k, v) in enumerate(formats)]
    path = edit(lambda plan: plan["ladder"].update(rungs=rungs))
    with pytest.raises(ConfigError, match=f"^kv='mine': .*{message}"):
        Engine(str(model), kv=path, kv_memory="16MiB")


def test_windows_are_part_of_a_fingerprint():
    config = config_from_hf(SHAPES["gemma-3-12b"])
    model = ModelFingerprint.of("gemma", config, None)
    data = msgspec.json.encode(model)
    assert msgspec.json.decode(data, type=ModelFingerprint) == model and len(model.layers) == 48
    model.check_shape(config, "mine.json")
    wider = replace(config, attention=tuple(spec._replace(window=None) for spec in config.attention))
    with pytest.raises(ConfigError, match="other layers have windows"):
        model.check_shape(wider, "mine.json")
    assert b"layers" not in msgspec.json.encode(ModelFingerprint.of("full", wider, None)).replace(b"num_layers", b"")
    for layers in ([[8, 256, 0]] * 48, [[8, 256]] * 47, [[8, 256 + number % 3] for number in range(48)]):
        bad = msgspec.json.encode(msgspec.to_builtins(model) | {"layers": layers})
        with pytest.raises(msgspec.ValidationError, match="layers"):
            msgspec.json.decode(bad, type=ModelFingerprint)
