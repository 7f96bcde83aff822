"""``plan`` as a command, on a tiny model and on the demo model; its file where ``--kv`` takes one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from qkv_engine import ConfigError
from qkv_engine.bench.plan_report import layer_rows
from qkv_engine.bench.plots.plan import plot_plan
from qkv_engine.bench.texts import file_texts, random_texts, task_texts
from qkv_engine.cli.main import main
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.loading import demo_folder
from qkv_engine.models.loader import read_config
from qkv_engine.plan_file import plan_bytes
from qkv_engine.planner.gradients import TextProfile
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.plan import KVPlan, Settings, read_plan
from qkv_engine.planner.pm_kvq import PMKVQ
from qkv_engine.planner.profile import LayerScores
from qkv_engine.text.tokenizer import Tokenizer

from ..models.tiny import write_tiny
from ..planner.profiles import made_up_profile

KVMIX = ["--method", "kvmix"]
QUICK = ["--task", "addition:6,sorting:20", "--samples", "2"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(demo_folder())


def make_plan(num_layers: int, settings: Settings) -> KVPlan:
    model = ModelFingerprint("weird $name_ [x]", "LlamaForCausalLM", num_layers, 8, 128, 4096, 32000, None)
    return KVPlan.make(settings, made_up_profile(model), model)


def test_a_plan_is_made_shown_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--method", "kvmix", "-o", "mine.json", "--plot", "scores.png", "--format", "json"]
    assert main(["plan", *words, *QUICK]) == 0
    out, err = capsys.readouterr()
    rows, plan = json.loads(out), read_plan(Path("mine.json"))
    assert [row["layer"] for row in rows] == list(range(8))
    scores, prompts = plan.profile.scores, plan.profile.prompts
    assert [row["k_score"] for row in rows] == scores.k and min(scores.k + scores.v) > 0
    assert sorted(row["k_bits"] for row in rows) == [*[2] * 7, 3] and sorted(row["v_bits"] for row in rows)[-1] == 4
    assert max(rows, key=lambda row: row["k_score"])["k_bits"] == 3
    assert max(rows, key=lambda row: row["v_score"])["v_bits"] == 4
    assert prompts.source == "addition 6, sorting 20" and prompts.count == 2 and prompts.tokens > 50
    assert err.splitlines() == [
        "qkv-engine: profiling 2 texts",
        "qkv-engine: wrote the plan to mine.json, a plot to scores.png",
    ]
    assert Path("scores.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_served_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *KVMIX, "-o", "mine.json", *QUICK, "--random", "--seed", "3", "--share", "0.5"]) == 0
    assert "layers at random" in capsys.readouterr().out
    assert read_plan(Path("mine.json")).settings.random_seed == 3
    words = ["--kv", "bf16,mine.json", "--tasks", "ledger:6", "--samples", "1", "--kv-memory", "96MiB", "-o", "json"]
    assert main(["eval", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kv"] for row in rows] == ["bf16", "mine"] and rows[1]["lowest_bits"] == 2
    assert main(["env", "--kv", "./mine.json", "-o", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv"]["preset"] == "mine" and facts["kv"]["rungs"][1]["rung"] == "kvmix"
    assert main(["env", str(write_tiny(Path("other"))), "--kv", "mine.json"]) == 2
    assert "another model (demo)" in capsys.readouterr().err
    bench = ["--kv", "mine.json", "--input-len", "8", "--output-len", "2", "--repeats", "1", "--warmup", "0"]
    assert main(["bench", *bench, "-o", "json", "--kv-memory", "64MiB"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kv"] == "mine"


def test_a_shape_has_random_weights_and_texts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--method", "kvmix", "--shape", "demo", "--samples", "2", "--max-tokens", "70", "-o", "mine.json"]
    assert main(["plan", *words]) == 0
    plan = read_plan(Path("mine.json"))
    assert plan.model.weights is None and plan.model.name == "demo"
    assert (plan.profile.prompts.source, plan.profile.prompts.tokens) == ("random tokens", 140)
    assert "2.125 bits" in capsys.readouterr().out
    assert main(["eval", "--kv", "mine.json", "--tasks", "ledger:6", "--samples", "1"]) == 2
    assert "the weights differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*KVMIX, "--share", "1.5"], "--share"),
        ([*KVMIX, "--share", "nan"], "--share"),
        ([*KVMIX, "--recent-ratio", "1"], "--recent-ratio"),
        ([*KVMIX, "--k-bits", "5"], "--k-bits"),
        ([*KVMIX, "--low-bits", "4"], "--low-bits"),
        ([*KVMIX, "--group", "11"], "--group"),
        (["--share", "0.5"], "--share=0.5: no option of --method mixed. Use --method kvmix"),
        ([*KVMIX, "--budget", "3bits"], "--budget='3bits': no option of --method kvmix"),
        (["--method", "pm-kvq", "--rungs", "4"], "--rungs=4: no option of --method pm-kvq"),
        (["--rungs", "13"], "--rungs=13"),
        (["--least-bits", "0"], "--least-bits=0"),
        (["--most-bits", "8"], "--most-bits=8: no option of --method mixed. Use --method pm-kvq"),
        (["--method", "pm-kvq", "--most-bits", "5"], "--most-bits=5: not supported. Choose from 16, 8, 4, 2"),
        (["--method", "pm-kvq", "--least-bits", "4", "--most-bits", "2"], "--most-bits=2"),
        (["--method", "pm-kvq", "--sink", "3"], "--sink=3"),
        ([*KVMIX, "--recent", "-1"], "--recent=-1"),
        (["--sink", "3"], "--sink=3"),
        (["--budget", "3"], "--budget='3': neither bits nor a size"),
        (["--context", "0"], "--context=0"),
        (["--context", "250"], "--context=250: no block leaves the window"),
        (["--position-scale", "0"], "--position-scale=0"),
        (["--kv-memory", "much"], "--kv-memory"),
        (["--from", "none.json"], "--from='none.json': cannot be read"),
        (["--samples", "0"], "--samples"),
        (["--samples", "100000000000"], "--samples=100000000000: out of range. Give an integer from 1 to 10,000"),
        (["--max-tokens", "1" + "0" * 30], "--max-tokens"),
        (["--data", "a\0b"], "--data"),
        (["--samples", "1"], "--samples=1: fewer"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--max-tokens", "40"], "--max-tokens"),
        (["--task", "poetry"], "--task"),
        (["--task", "sorting:2", "--samples", "1"], "tokens to predict"),
        (["--data", "none.jsonl"], "--data"),
        (["--data", "/dev/zero"], "--data"),
        (["--data", "none.jsonl", "--task", "sorting"], "cannot be combined with --task"),
        (["--shape", "llama-9"], "--shape"),
        (["--shape", "demo", "--task", "sorting"], "--task"),
        (["--output", "plan.txt"], "--output"),
        (["-o", "/nowhere/plan.json"], "--output"),
        (["--plot", "plot.bmp"], "--plot"),
        (["--device", "tpu"], "--device"),
        (["llama-3.1-8b"], "a shape without weights"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and named in err and "profiling" not in err
    assert not Path("plan.json").exists()


def test_an_interrupt_writes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> Iterator[TextProfile]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("qkv_engine.planner.gradients.profile_texts", interrupted)
    assert main(["plan", "--shape", "demo", "--samples", "2", "--max-tokens", "70", "--plot"]) == 130
    assert capsys.readouterr().out == "" and list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"), [("eval", ["--tasks", "sorting:5", "--samples", "1"]), ("bench", ["--output-len", "2"])]
)
def test_a_plan_that_does_not_fit_is_found_before_others_are_measured(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(demo_folder())
    fitting = replace(make_plan(8, KVmix()), model=ModelFingerprint.of("demo", config, None))
    unknown = json.loads(plan_bytes(fitting))
    unknown["ladder"]["rungs"][1]["k"] = "int2-channel-33"
    Path("other.json").write_bytes(plan_bytes(make_plan(8, KVmix())))
    Path("unknown.json").write_text(json.dumps(unknown))
    for name, message in (("other", "a plan for another model"), ("unknown", "format='int2-channel-33'")):
        assert main([command, "--kv", f"bf16,{name}.json", *words, "--kv-memory", "64MiB"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and f"--kv='{name}': {message}" in err


@pytest.mark.parametrize("method", ["mixed", "pm-kvq"])
def test_a_budget_that_nothing_keeps_is_found_before_anything_runs(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--method", method, "--budget", "1MiB", "--requests", "4"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and "--budget='1MiB': no plan is as small. Give at least " in err and "profiling" not in err
    least = err.split("at least ")[1].strip()
    assert main(["plan", "--method", method, "--budget", least, "--requests", "4", "--samples", "0"]) == 2


def test_a_budget_becomes_a_ladder_that_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--budget", "3.5bits", "--kv-memory", "64MiB", "-o", "mine.json", "--plot", "mine.svg"]
    assert main(["plan", *words, *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "demo · mixed, 3.5bits for 8,192 tokens · 2 texts" in out
    assert re.search(
        r"mixed-7: \d\.\d\d bits an element with metadata, predicted loss .* nats, [\d,]+ tokens in 64", out
    )
    assert "profiling 2 texts" in err and "scaling" not in err and b"<svg" in Path("mine.svg").read_bytes()
    plan = read_plan(Path("mine.json"))
    assert plan.profile.position_scale == 1 and plan.profile.key_scale is None and plan.profile.has_qk_norm
    assert len(plan.ladder.rungs) == 8
    assert main(["eval", "--kv", "mine.json", "--tasks", "sorting:9", "--samples", "1", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kv"] == "mine"
    assert main(["env", "--kv", "mine.json", "-o", "json"]) == 0
    assert [rung["rung"] for rung in json.loads(capsys.readouterr().out)["kv"]["rungs"]][-1] == "mixed-7"


def test_another_budget_or_method_takes_the_profile_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--position-scale", "2", "--method", "pm-kvq", "--task", "addition:6", "--samples", "2"]
    assert main(["plan", *words, "--budget", "4bits", "-o", "one.json"]) == 0
    assert "scaling the keys of 2 texts" in capsys.readouterr().err
    one = read_plan(Path("one.json"))
    assert one.profile.key_scale is not None and one.profile.position_scale == 2 and one.method == "pm-kvq"
    assert one.config("one").key_scale == one.profile.key_scale
    assert main(["plan", "--from", "one.json", "--budget", "3bits", "--eager", "-o", "two.json"]) == 0
    out, err = capsys.readouterr()
    assert "mixed, 3bits" in out and "profiling" not in err
    two = read_plan(Path("two.json"))
    assert two.profile == one.profile and two.model == one.model and two.ladder.eager
    assert main(["plan", "--from", "one.json", *KVMIX, "-o", "three.json"]) == 0
    assert read_plan(Path("three.json")).ladder.rungs[-1].name == "kvmix"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "3"], "--samples=3: belongs to a new profile. Leave --from out"),
        (["--task", "sorting"], "--task='sorting': belongs to a new profile"),
        (["--no-key-scale"], "--key-scale=False: belongs to a new profile"),
        (["--dtype", "bfloat16"], "--from='plan.json': the profile of a model in float32"),
        (["tiny"], "--from='plan.json': a plan for another model"),
        (["--budget", "1bits"], "--budget='1bits': no plan is as small. Give at least"),
    ],
)
def test_a_profile_for_something_else_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.json").write_bytes(plan_bytes(make_plan(2, Mixed(budget="4bits", context=8192))))
    write_tiny(Path("tiny"))
    assert main(["plan", *words, "--from", "plan.json", "-o", "other.json"]) in (2, 3)
    out, err = capsys.readouterr()
    assert out == "" and message in err and not Path("other.json").exists()


def test_a_plan_says_what_else_would_do_and_what_is_amiss(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(8, Mixed(budget="4bits", context=8192))
    profile = replace(plan.profile, key_outliers=[1.0, 30.0, *[1.0] * 6])
    Path("plan.json").write_bytes(plan_bytes(replace(plan, profile=profile)))
    assert main(["plan", "--from", "plan.json", "--method", "pm-kvq", "--budget", "5bits", "-o", "other.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Preset int4 is predicted as good: [\d.e-]+ nats at no more bytes", out)
    assert "Keys have channels up to 30 times the median (layers 1) and no q/k norm tames them" in out


@pytest.mark.parametrize(("loss", "lost"), [(0.0002, False), (3.3, False), (3.6, True), (7.5, True)])
def test_a_plan_tells_the_loss_at_scaled_positions(loss: float, lost: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Guessing among 1,024 words has 6.93 nats."""
    plan = make_plan(8, Mixed(budget="4bits", context=8192))
    profile, model = replace(plan.profile, loss=loss, position_scale=4), replace(plan.model, vocab_size=1024)
    Path("plan.json").write_bytes(plan_bytes(replace(plan, profile=profile, model=model)))
    assert main(["plan", "--from", "plan.json", "-o", "other.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Loss of the texts at 16 bits at positions times 4: {loss:.2g} nats a token" in out
    assert ("Warning: guessing has 6.93" in out and "choose a smaller --position-scale" in out) == lost


def test_the_windows_of_a_plan_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_bytes(plan_bytes(make_plan(8, Mixed(budget="4bits", context=8192))))
    words = ["plan", "--from", "plan.json", "--sink", "32", "-o", "other.json", "--method"]
    found = []
    for method in (
        ["kvmix", "--recent", "128"],
        ["pm-kvq", "--budget", "7bits", "--least-bits", "4", "--most-bits", "8"],
        ["mixed", "--budget", "4bits", "--recent", "0"],
    ):
        assert main([*words, *method]) == 0
        found.append(read_plan("other.json").config("plan"))
    assert [(kv.sink, kv.recent, kv.eager) for kv in found] == [(32, 128, True), (32, 128, False), (32, 0, False)]
    floors = {bits for side in (found[1].rungs[-1].k, found[1].rungs[-1].v) for bits in side}
    assert floors == {"int8-token-128", "int4-token-128"}


def test_kv_errors_name_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.json").write_text('{"version": 1')
    Path("int4.json").write_text("{}")
    for kv, message in (
        ("kvmix", "qkv-engine plan MODEL --method kvmix"),
        ("broken.json", "truncated"),
        ("int4,int4.json", "version"),
    ):
        assert main(["eval", "--kv", kv]) == 2
        err = capsys.readouterr().err
        assert err.startswith("qkv-engine: error: --kv=") and message in err


def test_two_of_one_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *KVMIX, "--shape", "demo", "--samples", "2", "--max-tokens", "70", "-o", "int4.json"]) == 0
    assert main(["eval", "--kv", "int4,int4.json"]) == 2
    assert "there is another int4. Rename" in capsys.readouterr().err


def test_its_help_needs_no_torch() -> None:
    code = "import sys; from qkv_engine.cli.main import _parse\ntry: _parse(['plan', '--help'])\nexcept SystemExit: "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--share" in done.stdout and done.stdout.splitlines()[-1] == "False"


# ---- texts


def test_only_the_reply_of_a_question_counts(tokenizer: Tokenizer) -> None:
    found = task_texts(tokenizer, "addition:3,sorting:9", samples=3, max_tokens=500)
    assert found.source == "addition 3, sorting 9" and len(found.texts) == 3
    for text in found.texts:
        asked, replied = text.token_ids[: text.first_label], text.token_ids[text.first_label :]
        assert tokenizer.decode(asked, False).endswith("<|im_start|>assistant\n")
        reply = tokenizer.decode(replied, False)
        assert reply.startswith("<think>") and reply.endswith("<|im_end|>")
    cut = task_texts(tokenizer, "addition:10", samples=3, max_tokens=128)
    assert all(len(text.token_ids) <= 128 for text in cut.texts)


def write(*lines: str) -> Path:
    path = Path("texts.jsonl")
    path.write_text("\n".join(lines))
    return path


def test_lines_of_a_file(tokenizer: Tokenizer) -> None:
    words = "one two three four five six seven " * 20
    path = write(
        json.dumps({"text": words}),
        "",
        json.dumps({"prompt": "What is 1+1?", "answer": "2"}),
        json.dumps({"text": words}),
    )
    whole, question = file_texts(tokenizer, path, samples=2, max_tokens=1000).texts
    assert whole.first_label == 1 and tokenizer.decode(whole.token_ids) == words
    assert tokenizer.decode(question.token_ids[question.first_label :]) == "2"
    assert len(file_texts(tokenizer, path, samples=24, max_tokens=100).texts) == 3
    assert file_texts(tokenizer, path, samples=1, max_tokens=150).prompts.tokens == 150


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no lines"),
        (["one", "two"], "line 1 is no text"),
        (['{"text": "a b"}', "[]"], "line 2"),
        (['{"text": 3}'], "line 1"),
        (['{"question": "a"}'], "line 1"),
        (['{"prompt": "a"}'], "line 1"),
        (['{"text": "a", "prompt": "b", "answer": "c"}'], "line 1"),
        (['{"text": "a"}'], "text 1 of 1 has no token to predict"),
        (['{"text": "one two three four"}'], r"only \d+ tokens to predict in 1 texts"),
        (['{"text": "one two three four five six"}'] * 24, "no text goes beyond the sink of 32 tokens"),
    ],
)
def test_a_bad_set_is_refused_by_line(lines: list[str], message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=rf"data='texts.jsonl'.*{message}.*\. Give"):
        file_texts(tokenizer, write(*lines), samples=24, max_tokens=100)


def test_a_line_too_long_for_the_tokenizer_is_named(tokenizer: Tokenizer) -> None:
    long = "word " * 2_000_000
    for line in ({"text": long}, {"prompt": long, "answer": "a"}):
        path = write(json.dumps({"text": "a b c"}), json.dumps(line))
        with pytest.raises(ConfigError, match=r"data='texts.jsonl': line 2: .*8388608"):
            file_texts(tokenizer, path, samples=24, max_tokens=100)


def test_random_texts_repeat_by_seed() -> None:
    one, two = (random_texts(100, samples=2, max_tokens=70, seed=seed).texts for seed in (0, 1))
    assert one == random_texts(100, samples=2, max_tokens=70).texts != two
    assert all(len(text.token_ids) == 70 and max(text.token_ids) < 100 for text in one)


# ---- the picture


@pytest.mark.parametrize(
    ("settings", "num_layers"),
    [
        *((KVmix(), 1), (KVmix(), 80), (KVmix(share=0), 8), (KVmix(share=1, random_seed=1), 8)),
        *((Mixed(budget="4bits", context=8192), 1), (Mixed(budget="16bits", context=8192), 8)),
        pytest.param(Mixed(budget="4bits", context=8192), 80, marks=pytest.mark.slow),
        (PMKVQ(budget="9bits", context=999), 8),
    ],
    ids=str,
)
def test_any_plan_can_be_drawn(settings: KVmix | Mixed | PMKVQ, num_layers: int) -> None:
    assert plot_plan(make_plan(num_layers, settings), dpi=40).startswith(b"\x89PNG")


def test_the_picture_has_every_layers_bits() -> None:
    made = make_plan(4, KVmix(share=0.5))
    profile = replace(made.profile, scores=LayerScores([1.0, 2.0, 3.0, 4.0], [0.0] * 4))
    plan = KVPlan.make(made.settings, profile, made.model)
    texts = re.findall(r"<!-- (.*?) -->", plot_plan(plan, kind="svg").decode())
    assert texts.count("3") >= 2 and texts.count("4") >= 2
    assert [(row.k_bits, row.v_bits) for row in layer_rows(plan)] == [(2, 4), (2, 4), (3, 2), (3, 2)]
