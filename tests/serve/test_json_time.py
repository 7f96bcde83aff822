"""The time that JSON takes to be decoded: what is counted, where it stands, what is refused and what is not."""

from __future__ import annotations

import json
import random

import pytest

from qkv_engine.serve import bodies, json_time
from qkv_engine.serve.bodies import CompletionBody
from qkv_engine.serve.errors import ApiError
from qkv_engine.serve.json_time import MAX_SECONDS, Cost, decoding_time

from .running import HELLO, Running

PARTS = {
    "lists and objects": ("[]", "{}"),
    "keys of objects": ('"a":0', '"a" : 0'),
    "values": ("5", '""', "null"),
    "very large or small numbers": ("1e300", "-1.5E-300", "1e+288", "0." + "0" * 99 + "1"),
}
COSTS = {cost.what: cost for cost in json_time.COSTS}
CASES = [(COSTS[what], part) for what, parts in PARTS.items() for part in parts]
MANY = round(MAX_SECONDS / COSTS["lists and objects"].seconds)


def of_parts(part: str, number: int) -> bytes:
    """A list, or an object of fields, of ``number`` parts."""
    begin, end = "{}" if ":" in part else "[]"
    return (begin + ",".join([part] * number) + end).encode()


@pytest.mark.parametrize(("cost", "part"), CASES)
def test_every_part_counts_until_there_are_too_many(cost: Cost, part: str):
    each = cost.seconds + (cost is not COSTS["values"]) * COSTS["values"].seconds
    assert decoding_time(of_parts(part, 101)) - decoding_time(of_parts(part, 1)) == pytest.approx(100 * each)
    most = int(MAX_SECONDS / each)
    assert decoding_time(of_parts(part, most - 100)) < MAX_SECONDS
    with pytest.raises(ApiError, match=f"so many {cost.what}") as refused:
        decoding_time(of_parts(part, most + 100))
    assert refused.value.status == 413


def test_several_texts_count_together():
    text = of_parts("[]", MANY // 2)
    assert decoding_time(text) < MAX_SECONDS
    with pytest.raises(ApiError):
        decoding_time(text, b'"', text)


@pytest.mark.parametrize("part", ["true", "12345", "1.5", "1e5", "1e-99", "0.000012", '"1e300"'])
def test_common_values_are_only_values(part: str):
    one = decoding_time(of_parts(part, 1))
    assert decoding_time(of_parts(part, 1001)) - one == pytest.approx(1000 * COSTS["values"].seconds)


@pytest.mark.parametrize("text", ["[{" * MANY, '"[' * MANY, "\\[" * MANY, '\\"[' * MANY, "1e300:" * MANY])
def test_what_stands_in_strings_does_not_count(text: str):
    assert decoding_time(json.dumps({"prompt": [text, "[", ""]}).encode()) < 1e-5
    with pytest.raises(ApiError, match="lists and objects"):
        decoding_time(json.dumps({"prompt": [text, [["]"]] * MANY]}).encode())


def outside_of_strings(text: bytes) -> bytes:
    """What ``decoding_time`` counts in, byte by byte."""
    found, in_string, is_escaped = bytearray(), False, False
    for byte in text:
        if byte == ord('"') and not is_escaped:
            in_string = not in_string
        elif not in_string:
            found.append(byte)
        is_escaped = in_string and byte == ord("\\") and not is_escaped
    return bytes(found)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 8])
def test_pieces_of_any_length_are_counted_alike(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_time, "PIECE", piece)
    draw = random.Random(piece)
    for _ in range(300):
        texts = ["".join(draw.choices('\\"[,a', k=draw.randrange(12))) for _ in range(4)]
        body = json.dumps([texts, {"a": texts}]).encode()
        assert b"".join(json_time._outside_of_strings(body)) == outside_of_strings(body)


@pytest.mark.parametrize("body", [b"", b'"', b'"\\', b"\\" * 9, b'"' + b"\\" * 70_000, b"\xff" * 9])
def test_what_is_no_json_is_left_to_the_decoder(body: bytes):
    assert decoding_time(body) < 1e-5
    with pytest.raises(ApiError) as refused:
        bodies.decode(body, CompletionBody)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1]] * MANY}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(4 * MANY)}}),
        ("/v1/completions", {"prompt": [1e300] * (MANY // 9)}),
        ("/detokenize", {"tokens": [5] * (50 * MANY)}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{}] * MANY}),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
        ("/v1/responses", {"input": HELLO, "tools": [{}] * MANY}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "tools": [{}] * MANY}),
    ],
)
def test_every_path_refuses_a_body_before_it_is_read(server: Running, path: str, body: object):
    refused = server.post(body, path)
    error = refused.json()["error"]
    assert refused.status_code == 413 and "takes too long to be decoded" in error["message"]


def test_arguments_of_earlier_calls_are_bounded_alike(server: Running):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [1e300] * 4000})}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    assert server.post({"messages": messages}, "/v1/chat/completions").status_code == 413
