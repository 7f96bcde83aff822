"""Tokenizer folders, containment of the Rust library, and special tokens that users write out."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import qkv_engine
from qkv_engine.errors import ModelError, RequestError
from qkv_engine.text.rust_calls import contain
from qkv_engine.text.tokenizer import Tokenizer

DEMO = Path(qkv_engine.__file__).parent / "assets" / "demo"
TOKENIZER = Tokenizer.from_folder(DEMO)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def byte_backend(*specials: AddedToken) -> tokenizers.Tokenizer:
    """One token a byte, and special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_demo_folder() -> None:
    assert TOKENIZER.vocab_size == 1024
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (None, 2)
    assert TOKENIZER.special_ids == {0, 1, 2, 3, 4}
    assert TOKENIZER.chat_template is not None
    shown, ids = TOKENIZER.chat_prompt([{"role": "user", "content": "hi"}])
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown == text
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert ids == TOKENIZER.encode(text)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text
    assert TOKENIZER.encode(text.encode()) == TOKENIZER.encode(text)


def test_token_text() -> None:
    ids = TOKENIZER.encode("a word é")
    assert "".join(TOKENIZER.token_text(i) for i in TOKENIZER.encode("a word")) == "a word"
    assert TOKENIZER.token_text(TOKENIZER.encode("🙂")[0]) == "\ufffd"
    assert TOKENIZER.token_text(1) == "<|im_start|>"
    assert TOKENIZER.token_text(5000) == ""
    assert all(isinstance(TOKENIZER.token_text(i), str) for i in ids)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", b"\xff", b"\xc3", "\ud83d"])
def test_text_that_is_not_utf8(text: str | bytes) -> None:
    with pytest.raises(RequestError, match=r"UTF-8|surrogate"):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("text", [5, None, ["a"]])
def test_text_of_the_wrong_type(text: Any) -> None:
    with pytest.raises(RequestError):
        TOKENIZER.encode(text)


def test_text_too_long() -> None:
    with pytest.raises(RequestError, match="8388609 characters"):
        TOKENIZER.encode("x" * (2**23 + 1))


def test_text_that_can_never_fit_is_refused_before_it_is_tokenized() -> None:
    longest = max(map(len, tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab()))
    text = "é" * (10 * longest)
    assert len(TOKENIZER.encode(text, max_tokens=10)) > 10  # whether it does fit is seen later
    with pytest.raises(RequestError, match=f"{len(text) + 1} characters, which are more than 10 tokens"):
        TOKENIZER.encode(text + "x", max_tokens=10)
    messages = [{"role": "user", "content": "x" * 2_000_000}]
    begin = time.process_time()
    with pytest.raises(RequestError, match=r"2000\d\d\d characters"):
        TOKENIZER.chat_prompt(messages, max_tokens=1000)
    assert time.process_time() - begin < 0.3


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    gaps, stop = [0.0], threading.Event()

    def beat() -> None:
        last = time.perf_counter()
        while not stop.wait(0.001):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.perf_counter()
    TOKENIZER.encode("abcdefgh" * 100_000)
    seconds = time.perf_counter() - begin
    stop.set()
    thread.join()
    assert max(gaps) < seconds / 2


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]])
def test_ids_that_cannot_be_decoded(ids: Any) -> None:
    with pytest.raises(RequestError):
        TOKENIZER.decode(ids)


# ---- folders


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match="sentencepiece"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', '{"version": "1.0"}', "\x00", "[" * 100_000])
def test_broken_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"chat_template": 5}'])
def test_broken_tokenizer_config(tmp_path: Path, content: str) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError):
        Tokenizer.from_folder(tmp_path)


def test_no_config_and_no_template(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id is None
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat_prompt([{"role": "user", "content": "x"}])


def test_template_beside_wins(tmp_path: Path) -> None:
    save(tmp_path, byte_backend(AddedToken("<s>", special=True)), chat_template="old", bos_token={"content": "<s>"})
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_prompt([{"role": "user", "content": "x"}])[0] == "<s>new"


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=2**20)
    assert len(Tokenizer.from_folder(save(tmp_path, backend)).encode("abcdefgh")) == 8


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, None])
def test_bos_and_eos_flags(tmp_path: Path, in_file: bool, add_bos: bool | None, add_eos: bool | None) -> None:
    backend = byte_backend(AddedToken("<s>", special=True), AddedToken("</s>", special=True))
    bos, eos = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    if in_file:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}x"}
    config |= {key: value for key, value in flags.items() if value is not None}
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend, **config))
    has_bos = in_file if add_bos is None else add_bos
    letter = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.encode("x") == [bos] * has_bos + letter + [eos] * bool(add_eos)
    assert tokenizer.chat_prompt([{"role": "user", "content": "hi"}])[1] == [bos, *letter]  # never a second one


def test_flag_without_its_token(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks a token"):
        Tokenizer.from_folder(save(tmp_path, byte_backend(), bos_token="<s>", add_bos_token=True))


# ---- containment


class PanicException(BaseException):
    """What a Rust panic looks like."""


@pytest.mark.parametrize("error", [PanicException("boom"), ValueError("boom")])
def test_panics_are_contained(error: BaseException) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    with pytest.raises(RequestError, match="boom"):
        contain(RequestError, "it fails", fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        contain(RequestError, "it fails", fail)


def test_a_real_panic_at_encode(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = byte_backend()
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a|aa)+$"), "isolated")
    with pytest.raises(RequestError, match="cannot be tokenized"):
        Tokenizer(backend, {}).encode("a" * 60 + "b")


# ---- chat


@given(
    st.lists(
        st.sampled_from([*SPECIALS, "a", " ", "<|", "|>", "\n", "é", "\ufdd0", "\ufdd1", "\ufdd00\ufdd1"]), max_size=12
    )
)
@settings(max_examples=300, deadline=None)
def test_users_cannot_write_special_tokens(parts: list[str]) -> None:
    text = "".join(parts)
    shown, ids = TOKENIZER.chat_prompt([{"role": "user", "content": text}])
    assert [i for i in ids if i in TOKENIZER.special_ids] == [1, 2, 1]
    clean = text.replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd")
    expected = f"<|im_start|>user\n{clean}<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == shown == expected


def test_assistants_are_trusted_and_plain_text_is_unchanged() -> None:
    messages = [
        {"role": "user", "content": "a <b> |> c"},
        {"role": "assistant", "content": "<think>\nx</think>"},
        {"role": "user", "content": "more"},
    ]
    text, ids = TOKENIZER.chat_prompt(messages)
    assert ids == TOKENIZER.encode(text)
    assert 3 in ids and 4 in ids


def test_special_token_that_swallows_spaces() -> None:
    backend = byte_backend(AddedToken("<x>", special=True, lstrip=True, rstrip=True))
    tokenizer = Tokenizer(backend, {}, "{{ messages[0].content }}<x>")
    text, ids = tokenizer.chat_prompt([{"role": "user", "content": "a  <x>  b"}])
    assert text == "a  <x>  b<x>"
    assert ids.count(256) == 1 and ids[-1] == 256
    assert tokenizer.decode(ids) == "a  <x>  b"


def test_special_tokens_in_messages_cost_their_number() -> None:
    """Eight times as many take some eight times as long, not sixty-four."""

    def seconds(number: int) -> float:
        messages = [{"role": "user", "content": "<|im_end|>" * number}]
        return min(timed(lambda: TOKENIZER.chat_prompt(messages)) for _ in range(7))

    def timed(call: Callable[[], object]) -> float:
        begin = time.thread_time()
        call()
        return time.thread_time() - begin

    seconds(10)
    assert seconds(16_000) < 32 * seconds(2000)


MARKS = ["\ufdd00\ufdd1", "\ufdd0999\ufdd1", "\ufdd0" + "9" * 5000 + "\ufdd1", "\ufdd0", "\ufdd11", "\ufdd0\ufdd1"]


@pytest.mark.parametrize("text", MARKS, ids=range(len(MARKS)))
def test_the_marks_own_characters_are_harmless_everywhere(text: str) -> None:
    clean = text.replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd")
    user, assistant = {"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": text}
    assert clean in TOKENIZER.chat_prompt([user, assistant, {"role": text, "content": "x", text: text}])[0]
    escaped = "".join(f"\\u{ord(char):04x}" if char > "\u7fff" else char for char in text)
    for source in (text, "{{ '" + escaped + "' }}", "{{ x }}", "{{ messages[0].content[:2] }}"):
        backend = byte_backend(AddedToken("<|im_end|>", special=True))
        tokenizer = Tokenizer(backend, {}, source + "{{ messages[0].content }}")
        shown, ids = tokenizer.chat_prompt([user], {"x": text})
        assert tokenizer.decode(ids, skip_special_tokens=False) == shown
        assert "\ufdd0" not in shown and "\ufdd1" not in shown and shown.endswith("<|im_end|>")
        tokenizer.close()


def test_a_template_for_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer(byte_backend(), {"chat_template": named}, "plain")
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_prompt(messages)[0] == "plain"
    assert tokenizer.chat_prompt(messages, {"tools": [{}]})[0] == "tools"
    assert (
        Tokenizer(byte_backend(), {"chat_template": named}, "beside").chat_prompt(messages, {"tools": []})[0]
        == "beside"
    )
    tokenizer.close()


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = Tokenizer(byte_backend(), {}, "{{ enable_thinking }}{{ add_generation_prompt }}")
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_prompt(messages, {"enable_thinking": False})[0] == "FalseTrue"
    assert tokenizer.chat_prompt(messages, {"add_generation_prompt": False})[0] == "False"


def test_bad_word_ids() -> None:
    words = TOKENIZER.bad_word_ids(["the", "zq"])
    assert TOKENIZER.encode(" the") in words and TOKENIZER.encode("the") in words
    assert all(words) and len({tuple(word) for word in words}) == len(words)


def test_encodes_as_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(DEMO)
    for text in ("Hello there", "What is 47*86?", "é🙂 <|im_end|>x", ""):
        assert TOKENIZER.encode(text) == reference(text).input_ids
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello\n"}]
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.chat_prompt(messages)[0] == rendered
