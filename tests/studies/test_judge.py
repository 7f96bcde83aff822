"""The judge: rows that are there are not measured again, plans are made from texts that are not judged."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qkv_engine import Engine
from qkv_engine.bench.divergence import task_texts
from qkv_engine.bench.harness import HarnessPlan, HarnessRow
from qkv_engine.bench.judged import JudgedRow
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.bench.report import as_json
from qkv_engine.bench.result_files import read_records
from qkv_engine.config import WEIGHTS
from qkv_engine.planner.plan import read_plan
from qkv_engine.presets import PRESETS
from studies import judge_harness, judge_ladders, judge_texts
from studies.judge import Judge, kept_rows, parse
from studies.judge_ladders import Contender, Planner, contenders, weights_contenders
from studies.judge_plot import draw
from studies.judge_texts import OTHER, OWN, Material, material_for

TASKS = parse_tasks("lookup:30", samples=2)
MATERIAL = Material("2 questions", 0, True, {}, lambda tokenizer, _: {t.label: task_texts(tokenizer, t) for t in TASKS})
CONTENDERS = {name: Contender(name, PRESETS[name]) for name in ("bf16", "int4", "kivi-2")}


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    opened, path = list[str](), tmp_path / "rows.jsonl"

    def open_engine(one: Contender) -> Engine:
        opened.append(one.name)
        return Engine(kv=one.kv, kv_memory="48MiB", prefix_caching=False)

    rows: dict[str, JudgedRow] = {}
    two = {name: CONTENDERS[name] for name in ("bf16", "int4")}
    Judge("demo", "w", MATERIAL, two, rows, open_engine).run(
        lambda: path.write_text("".join(as_json(asdict(row)) + "\n" for row in rows.values())) and None
    )
    assert opened == ["bf16", "int4"] and [json.loads(line)["kv"] for line in path.read_text().splitlines()] == opened
    kept = kept_rows(path, weights="w", settings="2 questions", names=list(CONTENDERS))
    assert kept == rows
    Judge("demo", "w", MATERIAL, CONTENDERS, kept, open_engine).run(lambda: None)
    assert opened[2:] == ["bf16", "kivi-2"]  # the reference is what others are compared with
    Judge("demo", "w", MATERIAL, CONTENDERS, kept, open_engine).run(lambda: None)
    assert len(opened) == 4
    assert kept["kivi-2"].block_bits == pytest.approx(2.28, abs=0.01) and kept["kivi-2"].lowest_bits == 2
    assert sum(kept["kivi-2"].kl["lookup 30"]) > sum(kept["int4"].kl["lookup 30"]) > 0
    draw(list(kept.values()), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_weights_are_compared_at_16_bits_of_kv() -> None:
    found = list(weights_contenders())
    assert [(one.name, one.kv.name, one.weights) for one in found] == [
        ("bf16", "bf16", None),
        *((f"weights {name}", "bf16", name) for name in WEIGHTS),
        ("int8", "int8", None),
    ]
    assert parse(["--output", "a.jsonl", "--weights"]).weights


@pytest.mark.parametrize("change", [{"weights": "v"}, {"settings": "3 questions"}, {"names": ["kivi-2"]}])
def test_rows_of_other_weights_or_settings_are_measured_anew(change: dict[str, str], tmp_path: Path) -> None:
    named = {"model": "m", "weights": "w", "settings": "2 questions", "replies": True, "reference": "bf16"}
    row = JudgedRow(**named, kv="bf16", status="ok")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(as_json(asdict(one)) + "\n" for one in (row, replace(row, kv="int4", status="failed"))))
    same = {"weights": "w", "settings": "2 questions", "names": ["bf16", "int4"]}
    assert kept_rows(path, **same) == {"bf16": row}  # what failed is tried again
    assert kept_rows(path, **(same | change)) == {}
    assert kept_rows(tmp_path / "none.jsonl", **same) == {}


def test_every_plan_stands_beside_one_from_unlike_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, run = tmp_path / "plan.json", list[list[str]]()
    assert judge_ladders._run(["plan", "--task", "addition:4", "--samples", "2", "--eager", "-o", str(plan)])

    def copied(words: list[str]) -> bool:
        Path(words[words.index("-o") + 1]).write_bytes(plan.read_bytes())
        run.append(words)
        return True

    monkeypatch.setattr(judge_ladders, "_run", copied)
    folder = tmp_path / "plans"
    folder.mkdir()
    planner = Planner(["demo"], folder, {OWN: ["--task", "a"], OTHER: ["--task", "b"]})
    found = {one.name: one for one in contenders(planner)}
    names = list(found)
    assert names[0] == "bf16" and len(names) == len(set(names)) >= 25
    plans = [f"{method} {bits}" for method in ("mixed", "pm-kvq") for bits in ("3.25", "2.55", "2.3")]
    for name in ("kvmix", "mixed 2.0", *plans):
        assert names[names.index(name) + 1] == f"{name}, unlike"
        assert (found[name].profile, found[f"{name}, unlike"].profile) == (OWN, OTHER)
    assert all(one.kv.eager or len(one.kv.rungs) == 1 for one in found.values())
    for name in ("kvmix", "pm-kvq 2.55"):
        equal = found[f"{name}, windows 32 + 128"]
        assert (equal.kv.sink, equal.kv.recent, equal.kv.recent_ratio) == (32, 128, 0)
        assert equal.kv.rungs == found[name].kv.rungs
    (by_hand,) = (one for one in found.values() if one.method == "by hand")
    sensitivities = read_plan(plan).profile.sensitivities.k["int2-channel-128"]
    assert [i for i, name in enumerate(by_hand.kv.rungs[-1].k) if name == "int4-channel-128"] == [
        sensitivities.index(max(sensitivities))
    ]
    profiled = [words for words in run if "--task" in words]
    assert [words[words.index("--task") + 1] for words in profiled] == ["a", "b", "a", "b"]  # and again, keys scaled
    assert [words[words.index("--method") + 1] for words in profiled] == ["mixed", "mixed", "pm-kvq", "pm-kvq"]
    number = len(run)
    assert list(contenders(planner)) == list(found.values()) and len(run) == number  # each plan is made once


def test_profiles_of_the_demo_model_are_not_the_exam(tmp_path: Path, demo_engine: Engine) -> None:
    material = material_for("demo", tmp_path, data=None, samples=8, seed=0)
    assert "2 of ledger 150" in material.settings and material.has_replies
    sets = material.sets(demo_engine.tokenizer, 8191)
    assert [len(texts) for texts in sets.values()] == [8] * 7 + [2]
    exam, like = ({task.split(":")[0] for task in tasks.split(",")} for tasks in (judge_texts.EXAM, judge_texts.UNLIKE))
    assert not exam & like


def test_another_model_reads_every_other_line(tmp_path: Path, demo_engine: Engine) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"text": f"Sort: {i} 5 99 23."}) + "\n" for i in range(6)))
    material = material_for("other", tmp_path, data=data, samples=2, seed=0)
    assert not material.has_replies and material.settings == "2 texts of mine.jsonl"
    (texts,) = material.sets(demo_engine.tokenizer, 100).values()
    judged = [demo_engine.tokenizer.decode(text.ids) for text in texts]
    assert judged == ["Sort: 0 5 99 23.", "Sort: 2 5 99 23."]
    like = Path(material.profiles[OWN][1]).read_text()
    assert "Sort: 1 5" in like and "Sort: 0 5" not in like
    material = material_for("other", tmp_path, data=None, samples=2, seed=0)
    (texts,) = material.sets(demo_engine.tokenizer, 300).values()
    assert {len(text.ids) for text in texts} == {300} and {text.first_scored for text in texts} == {1}


def test_a_plan_that_is_refused_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planner = Planner(["demo"], tmp_path, {OWN: ["--task", "addition:4", "--samples", "1"]})
    assert planner.plan(OWN, "mixed", "1.0") is None
    assert "no plan is as small" in capsys.readouterr().err


def test_tasks_of_the_harness_that_are_there_are_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, path = list[tuple[str, ...]](), tmp_path / "rows.jsonl"

    def run(plan: HarnessPlan, tasks: object, open_engine: object) -> Iterator[HarnessRow]:
        asked.append(plan.kvs)
        for kv in plan.kvs:
            yield HarnessRow(model=plan.model, task="arc", kv=kv, status="failed" if kv == "kivi-2" else "ok")

    monkeypatch.setattr(judge_harness, "run_harness", run)
    monkeypatch.setattr(judge_harness, "Tasks", lambda plan: plan.tasks)
    for _ in range(2):
        judge_harness.run_lm_eval("m", CONTENDERS, lambda one: None, path, tasks="arc,gsm8k", limit=3)
    assert asked == [("bf16", "int4", "kivi-2"), ("kivi-2",)]
    assert [row["kv"] for row in read_records(path, field="output")] == ["bf16", "int4", "kivi-2"]


@pytest.mark.parametrize(
    ("given", "model", "lm_eval"),
    [
        ([], "demo", None),
        (["MODEL=a/b", "SAMPLES=9", "DATA=x.jsonl"], "a/b", "arc_easy,gsm8k"),
        (["MODEL=c", "LM_EVAL="], "c", None),
    ],
)
def test_make_judge_names_its_files_by_the_model(given: list[str], model: str, lm_eval: str | None) -> None:
    done = subprocess.run(
        ["make", "-n", "judge", *given], cwd=judge_texts.ROOT, capture_output=True, text=True, check=True
    )
    (line,) = (line for line in done.stdout.replace("\\\n", "").splitlines() if "studies.judge" in line)
    args = parse(shlex.split(line)[3:])
    name = model.rpartition("/")[2]
    assert (args.model, args.lm_eval) == (model, lm_eval)
    assert args.output.match(f"results/*/judge-{name}.jsonl") and args.plot == Path(f"docs/images/judge-{name}.png")
    assert args.samples == (9 if "SAMPLES=9" in given else 24) and (args.data is not None) == ("DATA=x.jsonl" in given)
