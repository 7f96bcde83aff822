"""One tenant's first token beside another tenant who sends the most expensive bodies: fairness before the scheduler.

``python -m studies.greedy_load``: starts ``qkv-engine serve`` with two keys. Of each kind Alice sends bodies over
``--connections`` connections for ``--seconds``, each anew when it is answered, while Bob asks for one token again and
again. Prints Bob's longest wait beside that of his time alone, and the server's largest resident memory so far. The bar
is a second more than alone, and 2 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import httpx

from .http_load import served

KEYS = {"alice": "alice-is-greedy", "bob": "bob-has-one-key"}
SIZE = (8 << 20) - 4096  # bytes of a large body
CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
SLOW = "start: A\nA: /(.*a.*){5}/ & /(.*b.*){5}/ & ~/.*c.*/ & /[a-z]{0,500}/ & ~/(.*zz.*){3}/"
CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1400)} | {"d1400": {"type": "integer"}}


def repeated(text: str, size: int = SIZE) -> str:
    return text * (size // len(text))


def of_parts(before: str, part: str, after: str, size: int = SIZE) -> bytes:
    """A body with a list of ``part``s."""
    return (before + ",".join([part] * (size // (len(part) + 1))) + after).encode()


USER = {"role": "user", "content": "x"}


def with_call(arguments: str) -> dict[str, object]:
    """A message with an earlier call of a tool."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each kind."""
    call = '{"id":"x","type":"function","function":{"name":"f","arguments":"{}"}}'
    calls = '{"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":['
    form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/d0", "$defs": CHAIN}}}
    return {
        "tokenize words": (TOKENIZE, json.dumps({"prompt": repeated("a ")}).encode()),
        "tokenize line ends": (TOKENIZE, b'{"prompt":"' + repeated("\\n").encode() + b'"}'),
        "tokenize what fits": (TOKENIZE, json.dumps({"prompt": repeated("a ", 400_000)}).encode()),
        "detokenize": (DETOKENIZE, of_parts('{"tokens":[', "9", "]}")),
        "ids at the limit": (COMPLETIONS, of_parts('{"max_tokens":1,"prompt":[', "12345", "]}", 7_400_000)),
        "prompt of ids": (COMPLETIONS, of_parts('{"max_tokens":1,"prompt":[', "9", "]}")),
        "many prompts": (COMPLETIONS, of_parts('{"prompt":[', "[1]", "]}")),
        "many texts": (COMPLETIONS, of_parts('{"prompt":[', '""', "]}")),
        "large numbers": (COMPLETIONS, of_parts('{"prompt":[', "1e300", "]}")),
        "2,400 large numbers": (COMPLETIONS, of_parts('{"prompt":[', "1e300", "]}", 14_400)),
        "20 large numbers": (COMPLETIONS, of_parts('{"prompt":[', "1e300", "]}", 120)),
        "small numbers": (COMPLETIONS, of_parts('{"prompt":[', f"0.{'0' * 300}12345678901234567890123", "]}")),
        "arguments": (CHAT, json.dumps({"messages": [USER, *[with_call("[" + "1e300," * 99 + "1]")] * 20]}).encode()),
        "keys": (COMPLETIONS, of_parts('{"prompt":"x","logit_bias":{', '"12345":1', "}}")),
        "keys that fit": (COMPLETIONS, of_parts('{"prompt":"x","logit_bias":{', '"12345":1', "}}", 780_000)),
        "8,000 prompts": (COMPLETIONS, of_parts('{"prompt":[', "[1]", "]}", 32_000)),
        "prompts that fit": (COMPLETIONS, of_parts('{"prompt":[', "[1]", "]}", 96_000)),
        "long prompt": (COMPLETIONS, json.dumps({"prompt": repeated("a ")}).encode()),
        "chat": (CHAT, json.dumps({"messages": [{"role": "user", "content": repeated("a ")}]}).encode()),
        "tool calls": (CHAT, of_parts(calls, call, "]}]}", 6 << 20)),
        "tools": (CHAT, of_parts('{"messages":[{"role":"user","content":"x"}],"tools":[', '{"a":{}}', "]}")),
        "tools that fit": (
            CHAT,
            of_parts('{"messages":[{"role":"user","content":"x"}],"tools":[', "{}", "]}", 24_500),
        ),
        "many answers": (
            COMPLETIONS,
            json.dumps({"prompt": "x", "n": 16, "max_tokens": 200, "ignore_eos": True}).encode(),
        ),
        "8,000 ids": (COMPLETIONS, of_parts('{"max_tokens":1,"prompt":[', "9", "]}", 16_000)),
        "slow grammar": (COMPLETIONS, json.dumps({"prompt": "x", "structured_outputs": {"grammar": SLOW}}).encode()),
        "chain of references": (COMPLETIONS, json.dumps({"prompt": "x", "response_format": form}).encode()),
    }


def client(port: int, tenant: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=600, limits=limits)


async def waits_of_bob(port: int, until: float) -> list[float]:
    """Seconds of Bob's requests for one token, one after the other."""
    found: list[float] = []
    async with client(port, "bob") as bob:
        while not found or time.monotonic() < until:
            begin = time.monotonic()
            answer = await bob.post(COMPLETIONS, json={"prompt": f"Hello {begin}", "max_tokens": 1})
            answer.raise_for_status()
            found.append(time.monotonic() - begin)
            await asyncio.sleep(0.02)
    return found


async def beside(
    port: int, path: str, body: bytes, connections: int, seconds: float
) -> tuple[list[float], Counter[int]]:
    """Bob's waits beside Alice, and the statuses that she got."""
    statuses, end = Counter[int](), time.monotonic() + seconds

    async def send(alice: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            statuses[(await alice.post(path, content=body)).status_code] += 1

    async with client(port, "alice") as alice:
        sending = [asyncio.ensure_future(send(alice)) for _ in range(connections)]
        await asyncio.sleep(0.1)
        waits = await waits_of_bob(port, end)
        await asyncio.gather(*sending)
    return waits, statuses


def memory_of(process: int) -> float:
    """The largest resident memory of a process so far, in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("the system does not say")


def measure(port: int, process: int, args: argparse.Namespace) -> None:
    alone = asyncio.run(waits_of_bob(port, time.monotonic() + args.seconds))
    print(f"{'Alice sends':20} {'median':>8} {'longest':>8} {'MiB':>7}  her answers")
    print(f"{'nothing':20} {median(alone):7.3f}s {max(alone):7.3f}s {memory_of(process):7.0f}", flush=True)
    for name, (path, body) in bodies().items():
        if not args.only or name in args.only:
            waits, statuses = asyncio.run(beside(port, path, body, args.connections, args.seconds))
            print(
                f"{name:20} {median(waits):7.3f}s {max(waits):7.3f}s {memory_of(process):7.0f}  {dict(statuses)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", action="append", help="a kind; all by default")
    parser.add_argument("serve", nargs="*", help="options of qkv-engine serve")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
        file.flush()
        with served(["--api-key-file", file.name, *args.serve]) as ((_, port), process):
            measure(port, process, args)


if __name__ == "__main__":
    main()
