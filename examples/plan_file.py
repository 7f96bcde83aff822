"""Formats chosen layer by layer: qkv-engine plan --budget 3bits, then python examples/plan_file.py plan.json"""

import sys

from qkv_engine import Engine

plan = sys.argv[1]
with Engine(kv=plan, kv_memory="64MiB") as engine:  # a string that ends in .json, or a Path
    print(*engine.describe(), sep="\n")
    output = engine.chat("What is 47*86?")
    print(output.text, output.kv.blocks)
