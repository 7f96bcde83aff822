"""Stop strings over HTTP end an answer, not the reasoning before it."""

import json

import pytest

from .running import HELLO, Running

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "stop",
    [
        "\n",
        ["\n\n", "Problem:", "<|endoftext|>"],
        ["0=4", "so", "Question:", "</s>", "<|im_end|>"],  # the first two stand in the reasoning; lm-eval's of gsm8k
    ],
)
def test_an_answer_is_whole_whatever_its_reasoning_holds(server: Running, stop: str | list[str]):
    plain = server.post({"messages": HELLO}, CHAT).json()["choices"][0]
    assert server.post({"messages": HELLO, "stop": stop}, CHAT).json()["choices"][0] == plain
    assert plain["message"]["content"] == "4042" and "0=4" in plain["message"]["reasoning_content"]


def test_the_answer_is_ended_by_its_first_stop_string(server: Running):
    body = {"messages": HELLO, "stop": ["\n\n", "0=4", "42"]}
    plain = server.post({"messages": HELLO}, CHAT).json()["choices"][0]["message"]
    choice = server.post(body, CHAT).json()["choices"][0]
    assert choice["message"] == plain | {"content": "40"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "42")
    lines = server.post(body | {"stream": True}, CHAT).text.split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    for name, whole in (("content", "40"), ("reasoning_content", plain["reasoning_content"])):
        assert "".join(one["delta"].get(name, "") for one in choices) == whole
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "42")


def test_a_text_completion_is_ended_anywhere(server: Running):
    prompt = f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    choice = server.post({"prompt": prompt, "max_tokens": 100, "stop": ["0=4"]}).json()["choices"][0]
    assert choice["stop_reason"] == "0=4" and "4042" not in choice["text"]
