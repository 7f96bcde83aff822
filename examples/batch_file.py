"""Answers a file of questions: python examples/batch_file.py questions.jsonl answers.jsonl

A line of the input is {"question": "..."}; a line of the output has "answer" and "finish_reason", too.
"""

import json
import sys
from pathlib import Path

from qkv_engine import Engine

source, target = map(Path, sys.argv[1:])
rows = [json.loads(line) for line in source.read_text().splitlines()]

with Engine() as engine:  # all questions are handed over at once: the engine batches them as memory allows
    outputs = engine.chat([[{"role": "user", "content": row["question"]}] for row in rows], use_tqdm=True)

with target.open("w") as file:
    for row, output in zip(rows, outputs, strict=True):
        answer = {"answer": output.text, "finish_reason": output.outputs[0].finish_reason}
        file.write(json.dumps(row | answer) + "\n")
