"""Prints an answer as it comes, the model's thinking in grey: python examples/stream.py [QUESTION] [MODEL]"""

import sys

from qkv_engine import Engine

question = sys.argv[1] if len(sys.argv) > 1 else "What is 47*86?"
model = sys.argv[2] if len(sys.argv) > 2 else None  # None: the demo model
GREY, PLAIN = "\033[90m", "\033[0m"

with Engine(model) as engine:
    messages = [{"role": "user", "content": question}]
    with engine.stream(messages, engine.params(output_kind="delta")) as outputs:
        for output in outputs:  # leaving the loop early aborts the request
            if output.outputs[0].reasoning_delta:
                print(GREY + output.outputs[0].reasoning_delta + PLAIN, end="", flush=True)
            print(output.delta, end="", flush=True)
    print()
