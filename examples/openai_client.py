"""Asks a server through OpenAI's client: qkv-engine serve, then python examples/openai_client.py [URL]"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="any, unless the server has keys")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is 47*86?"}]

answer = client.chat.completions.create(model=model, messages=question, extra_body={"kv_floor": "int8"})
print(answer.choices[0].message.content)
print("fewest bits of its KV:", answer.usage.kv_bits)

fields = {"answer": {"type": "integer"}}
schema = {"type": "object", "properties": fields, "required": ["answer"], "additionalProperties": False}
form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
for chunk in client.chat.completions.create(model=model, messages=question, response_format=form, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
