"""``qkv-engine serve --replicas 2`` as a program on a cluster of this machine, one of them killed in the middle."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
KEY = "a-secret-key"
QUESTION = {"role": "user", "content": "What is 47*86?"}
DRAIN = 8.0  # seconds that requests get to end
LONG = {"max_tokens": 1000, "ignore_eos": True}


class Program:
    """A running server, and clients of it."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self.process, url = process, f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {KEY}"})
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)

    def samples(self, name: str) -> dict[str, float]:
        """The sum of a metric's samples by replica."""
        found: dict[str, float] = {}
        for labels, value in re.findall(rf"^qkv:{name}{{(.*)}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE):
            replica = re.search(r'replica="(\w+)"', labels)
            assert replica
            found[replica[1]] = found.get(replica[1], 0.0) + float(value)
        return found


@contextmanager
def launched(keys: Path) -> Iterator[Program]:
    """A server of two replicas, in a process group of its own."""
    keys.write_text(f"tenant {KEY}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "qkv_engine", "serve", "--replicas", "2", "--port", str(port)]
    options = ["--api-key-file", str(keys), "--kv-memory", "64MiB", "--threads", "1", "--drain-timeout", f"{DRAIN:g}"]
    folder = Path(__file__).parent  # not the root, whose kernels/ would be on the path of Ray's workers
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=folder, process_group=0
    ) as process:
        try:
            assert process.stderr is not None
            lines = []
            while not (lines and "serving demo" in lines[-1]):
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
            yield Program(process, port)
        finally:
            process.terminate()
            process.stderr.close()
            process.wait(60)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with launched(tmp_path_factory.mktemp("keys") / "keys") as found:
        yield found


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def replica_processes() -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "ray::ServeReplica:qkv-engine:Replica" in line]


def test_it_answers_as_one_server_does(program: Program):
    answer = program.openai.chat.completions.create(model="demo", messages=[QUESTION])
    assert answer.choices[0].message.content == "4042"
    chunks = list(program.openai.completions.create(model="demo", prompt="Hello", max_tokens=3, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as caught:
        program.openai.completions.create(model="demo", prompt="Hello", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    assert len(program.http.get("/v1/models").headers.get_list("x-request-id")) == 1
    assert program.http.get("/metrics", headers={"authorization": "Bearer other"}).status_code == 401
    assert program.http.get("/health", headers={"authorization": ""}).status_code == 200


def test_a_conversation_stays_on_its_replica(program: Program):
    before = program.samples("prompt_tokens_total")
    messages = [QUESTION]
    for _ in range(4):
        answer = program.openai.chat.completions.create(model="demo", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}, QUESTION]
    after = program.samples("prompt_tokens_total")
    assert len(after) == 2
    assert sum(after[replica] > before[replica] for replica in after) == 1


def test_conversations_spread_over_the_replicas(program: Program):
    before = program.samples("prompt_tokens_total")
    for number in range(16):  # all on one side once in 32,768 runs
        program.openai.completions.create(model="demo", prompt=f"{number} apples", max_tokens=1)
    after = program.samples("prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in after)


def test_a_client_that_leaves_ends_its_request(program: Program):
    with program.openai.completions.create(
        model="demo", prompt="Hello", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert sum(program.samples("num_requests_running").values()) == 1
    wait_for(lambda: sum(program.samples("num_requests_running").values()) == 0, seconds=10)


def test_a_replica_dies_in_the_middle(program: Program):
    """Whole answers all come, as do the streams of the other replica; those that had begun on it end with an error."""
    bodies = [{"model": "demo", "prompt": f"{number} pears", **LONG} for number in range(8)]

    def stream(body: dict[str, object]) -> str:
        return program.http.post("/v1/completions", json=body | {"stream": True}).text

    def whole(body: dict[str, object]) -> int:
        answer = program.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    victim, survivor = replica_processes()
    with ThreadPoolExecutor(16) as pool:
        streams, wholes = [pool.submit(stream, body) for body in bodies], [pool.submit(whole, body) for body in bodies]
        wait_for(lambda: sum(program.samples("num_requests_running").values()) == 16)
        time.sleep(1)  # for the streams' first chunks
        os.kill(victim, signal.SIGKILL)
        assert [one.result() for one in wholes] == [LONG["max_tokens"]] * 8
        texts = [one.result() for one in streams]
    cut = [text for text in texts if '"code":"replica_lost"' in text]
    assert 0 < len(cut) < 8
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert all('"finish_reason":"length"' in text for text in texts if text not in cut)
    wait_for(lambda: len(replica_processes()) == 2)
    wait_for(lambda: len(program.samples("num_requests_running")) == 2)
    assert survivor in replica_processes()


def test_its_end_waits_for_streams_and_cuts_late_ones(program: Program):
    """Also where the signal is one to the process group, as of timeout(1) or a shell's kill %1."""
    body = {"model": "demo", "ignore_eos": True, "stream": True}

    def stream(number: int, length: int) -> str:
        return program.http.post("/v1/completions", json=body | {"prompt": f"{number} figs", "max_tokens": length}).text

    with ThreadPoolExecutor(4) as pool:
        late = [pool.submit(stream, number, 5000) for number in range(3)]
        wait_for(lambda: sum(program.samples("num_requests_running").values()) == 3)
        soon = pool.submit(stream, 3, 200)
        wait_for(lambda: sum(program.samples("num_requests_running").values()) == 4)
        begin = time.monotonic()
        os.killpg(program.process.pid, signal.SIGTERM)
        time.sleep(1)
        refused = program.http.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert '"finish_reason":"length"' in soon.result()
        for text in (one.result() for one in late):
            assert '"code":"shutting_down"' in text and text.endswith("data: [DONE]\n\n")
    assert program.process.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < DRAIN + 10
    wait_for(lambda: not replica_processes(), seconds=10)


def test_a_second_signal_ends_it_at_once(tmp_path: Path):
    with launched(tmp_path / "keys") as program, ThreadPoolExecutor(1) as pool:
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        stream = pool.submit(program.http.post, "/v1/completions", json=body)
        wait_for(lambda: sum(program.samples("num_requests_running").values()) == 1)
        begin = time.monotonic()
        program.process.send_signal(signal.SIGINT)
        time.sleep(1)
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(60) == 128 + signal.SIGINT
        assert time.monotonic() - begin < DRAIN
        with pytest.raises(httpx.RemoteProtocolError):
            stream.result()
    wait_for(lambda: not replica_processes(), seconds=10)
