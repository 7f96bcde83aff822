"""A folder of tasks for the lm-evaluation-harness, one of each kind of request, that the demo model can do."""

from __future__ import annotations

import json
import random
from pathlib import Path

from qkv_engine.bench.grading import Example, sample_examples

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
{body}
"""
BODIES = {
    "demo_choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "demo_rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "demo_generate": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["2)", "Zed"], max_gen_toks: 40, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(folder: Path) -> Path:
    """Writes tasks with two questions each, contexts of 190 and 320 tokens, and returns the folder."""
    rng = random.Random(0)
    examples = sample_examples("ledger", 12, 1, seed=3) + sample_examples("lookup", 40, 1, seed=4)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(_question(example, rng)) + "\n" for example in examples))
    for name, body in BODIES.items():
        text = TASK.format(name=name, data=data, cache=folder / "cache", body=body)
        (folder / f"{name}.yaml").write_text(text)
    return folder


def _question(example: Example, rng: random.Random) -> dict[str, object]:
    """The choices are beginnings of the reply, of which one is right."""
    head = example.reply.removesuffix("<|im_end|>")[:40]
    digits = "0123456789"
    wrong = [head[:20] + head[20:].translate({ord(c): rng.choice(digits) for c in digits}) for _ in range(2)]
    choices = [head, *wrong]
    label = rng.randrange(3)
    choices[0], choices[label] = choices[label], choices[0]
    return {
        "question": example.chat,
        "answer": example.answer,
        "text": example.chat + example.reply,
        "choices": choices,
        "label": label,
    }
