"""Streamed text equals decoding everything at once and cutting it at the first stop string."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

import qkv_engine
from qkv_engine.errors import RequestError
from qkv_engine.text.reasoning import OutputText, ReasoningMarks
from qkv_engine.text.stop_strings import StopFinder
from qkv_engine.text.tokenizer import Tokenizer

DEMO = Path(qkv_engine.__file__).parent / "assets" / "demo"
WORDS = ["▁", "▁the", "▁a", "b", "ab", "c", "▁▁", "é", "中", "\n", "▁▁▁x", "\ufffd", "�b"]


def byte_fallback_backend(strip: bool) -> tokenizers.Tokenizer:
    """Llama-2 style: metaspace pieces and byte tokens; with ``strip`` the text's first space is dropped."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(dict.fromkeys(WORDS))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """A decoder without a table of its own: streamed through the window."""
    backend = byte_fallback_backend(strip=False)
    backend.decoder = decoders.Metaspace()
    return backend


def windowed_byte_level_backend() -> tokenizers.Tokenizer:
    """The demo's tokens under a decoder that has no fast path."""
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def suffix_backend() -> tokenizers.Tokenizer:
    """GPT-1 style: a suffix ends a word; some tokens have it inside, or more than once."""
    words = ["a</w>", "b", "ab</w>", "a</w>b", "</w>", "</w></w>x", "é</w>", "c</w>c</w>"]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="b"))
    backend.decoder = decoders.BPEDecoder("</w>")
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


TOKENIZERS = {
    "suffix": Tokenizer(suffix_backend(), {}),
    "byte_level": Tokenizer.from_folder(DEMO),
    "byte_fallback": Tokenizer(byte_fallback_backend(strip=True), {"bos_token": "<s>"}),
    "byte_fallback_unstripped": Tokenizer(byte_fallback_backend(strip=False), {}),
    "metaspace": Tokenizer(metaspace_backend(), {}),
    "windowed_byte_level": Tokenizer(windowed_byte_level_backend(), {}),
}
# Bytes of multi-byte characters, whole and damaged, are what a uniform choice of ids would hardly ever make.
SNIPPETS = [*"aé中🙂 b", "ab", "abc", "\n\n", "👨‍👩‍👧", "é"]


def first_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the match that is complete earliest, the longest of those."""
    ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(ends, default=None)


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        if rng.random() < 0.5:
            ids.append(rng.randrange(tokenizer.vocab_size + 3))
        else:
            piece = tokenizer.encode(rng.choice(SNIPPETS), add_special_tokens=False)
            ids += piece[: rng.randrange(1, len(piece) + 1)] if rng.random() < 0.3 else piece
    return ids


def output_text(
    tokenizer: Tokenizer,
    *,
    stop: Sequence[str] = (),
    keeps_stop: bool = False,
    skip_special_tokens: bool = True,
    prompt_ids: Sequence[int] = (),
    marks: ReasoningMarks | None = None,
    min_tokens: int = 0,
) -> OutputText:
    stops = StopFinder(stop, keeps_stop) if stop else None
    return OutputText(lambda: tokenizer.text_stream(skip_special_tokens, prompt_ids), stops, marks, min_tokens)


def push(text: OutputText, token_id: int) -> str:
    """The text that ``token_id`` adds."""
    num_before = len(text.pieces)
    text.push(token_id)
    return "".join(text.pieces[num_before:])


def finish(text: OutputText) -> str:
    """The text that the end adds."""
    num_before = len(text.pieces)
    text.finish()
    return "".join(text.pieces[num_before:])


def stream(text: OutputText, ids: list[int]) -> tuple[str, list[str]]:
    """The whole text of ``ids``, and what each of them and the end add to it."""
    deltas = []
    for token_id in ids:
        deltas.append(push(text, token_id))
        if text.stopped is not None:
            break
    deltas.append(finish(text))
    return text.text, deltas


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_full_decode(name: str, skip: bool) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(f"{name}{skip}")
    for _ in range(6000):
        ids = random_ids(rng, tokenizer, rng.randrange(24))
        text, deltas = stream(output_text(tokenizer, skip_special_tokens=skip), ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids
        assert text.encode("utf-8") is not None  # no surrogates
        assert len(deltas) == len(ids) + 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_match_the_oracle(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(name)
    num_stopped = 0
    for _ in range(6000):
        ids = random_ids(rng, tokenizer, rng.randrange(1, 30))
        text = tokenizer.decode(ids)
        stops = [random_stop(rng, text) for _ in range(rng.randrange(1, 4))]
        keep = rng.random() < 0.5
        found = output_text(tokenizer, stop=stops, keeps_stop=keep)
        streamed, _ = stream(found, ids)
        match = first_match(text, stops)
        if match is None:
            assert (streamed, found.stopped) == (text, None)
        else:
            end, start, stop = match
            assert (streamed, found.stopped) == (text[: end if keep else start], stop), (ids, stops)
            assert push(found, ids[0]) == finish(found) == ""
            num_stopped += 1
    assert num_stopped > 1500


def random_stop(rng: random.Random, text: str) -> str:
    """Usually a part of the text, often one that overlaps itself or other stops."""
    if text and rng.random() < 0.7:
        start = rng.randrange(len(text))
        return text[start : start + rng.randrange(1, 6)]
    return "".join(rng.choice("ab é") for _ in range(rng.randrange(1, 5)))


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(0, 12),
)
@settings(max_examples=400, deadline=None)
def test_stops_over_two_letters(text: str, stops: list[str], min_tokens: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.encode(char)[0] for char in text]  # one character a token
    found = output_text(tokenizer, stop=stops, min_tokens=min_tokens)
    streamed, deltas = stream(found, ids)
    ends = [(end, start, text[start:end]) for end in range(min_tokens + 1, len(text) + 1) for start in range(end)]
    match = min(((end, start) for end, start, part in ends if part in stops), default=None)
    assert streamed == (text if match is None else text[: match[1]])
    # What is held back may still become a stop string, so it is shorter than the longest.
    given_out = 0
    for i, delta in enumerate(deltas[:-1]):
        given_out += len(delta)
        if found.stopped is None:
            assert i + 1 - given_out <= max(map(len, stops))


def test_half_a_character_waits_and_a_broken_one_is_replaced() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    smile, letter = tokenizer.encode("🙂"), tokenizer.encode("a")[0]
    assert len(smile) == 4
    found = output_text(tokenizer)
    assert [push(found, i) for i in smile] == ["", "", "", "🙂"]
    assert [push(found, i) for i in smile[:2]] == ["", ""]
    assert push(found, letter) == "\ufffda"
    assert push(found, smile[0]) == ""
    assert finish(found) == "\ufffd"


def test_one_bad_byte_spoils_its_run() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    run = [3 + byte for byte in "é".encode()]
    found = output_text(tokenizer)
    deltas = [push(found, i) for i in [*run, 3 + 0xFF, 262]]
    assert deltas == ["", "", "", "\ufffd\ufffd\ufffdb"]
    assert "".join(deltas) == tokenizer.decode([*run, 3 + 0xFF, 262])


def test_leading_space_is_kept_after_a_prompt() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    the, bos = 260, 1
    assert stream(output_text(tokenizer), [the, the])[0] == "the the"
    assert stream(output_text(tokenizer, prompt_ids=[bos]), [the])[0] == "the"
    assert stream(output_text(tokenizer, prompt_ids=[bos, the]), [the])[0] == " the"
    suffix, a, start = TOKENIZERS["suffix"], 0, 8
    assert stream(output_text(suffix), [a, a])[0] == "a a"
    assert stream(output_text(suffix, prompt_ids=[a, start]), [start, a])[0] == " a"
    window = TOKENIZERS["metaspace"]
    assert stream(output_text(window, prompt_ids=[the, the]), [the])[0] == " the"


def test_stop_string_inside_a_byte_run_is_found_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    found = output_text(tokenizer, stop=["🙂"])
    assert [push(found, 3 + byte) for byte in "x🙂y".encode()] == [""] * 6
    assert finish(found) == "x"
    assert found.stopped == "🙂"


def random_decoder(rng: random.Random) -> dict[str, Any]:
    """One to three steps of any kind, as tokenizer.json has them."""
    choices: list[dict[str, Any]] = [
        {"type": "BPEDecoder", "suffix": rng.choice(["</w>", "", "##"])},
        {"type": "ByteFallback"},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "CTC", "pad_token": "a", "word_delimiter_token": rng.choice("| "), "cleanup": rng.random() < 0.5},
        {"type": "Fuse"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": rng.choice(["always", "never"]), "split": True},
        {"type": "Replace", "pattern": {"String": rng.choice(["▁", "a", " "])}, "content": rng.choice([" ", "", "bb"])},
        {"type": "Strip", "content": rng.choice(" b"), "start": rng.randrange(3), "stop": rng.randrange(2)},
        {"type": "WordPiece", "prefix": "##", "cleanup": rng.random() < 0.5},
    ]
    return {"type": "Sequence", "decoders": [rng.choice(choices) for _ in range(rng.randrange(1, 4))]}


def test_a_stream_under_any_decoder_equals_full_decode() -> None:
    """Steps may come in orders that no model has, in which a token changes all text before it."""
    rng, num_compared = random.Random(0), 0
    words = [*"ab ▁é.Ã©|", "</w>", "##", "a</w>", "##b", "▁a", "<0xC3>", "<0xA9>", "<0x41>", " '", "n't", "\ufffd"]
    for _ in range(600):
        backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        spec = json.loads(backend.to_str()) | {"decoder": random_decoder(rng)}
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), {})
        for _ in range(8):
            ids = [rng.randrange(len(words)) for _ in range(rng.randrange(1, 24))]
            try:
                whole, found = tokenizer.decode(ids), stream(output_text(tokenizer), ids)[0]
            except RequestError:  # the library panics
                continue
            assert found == whole, (spec["decoder"], ids)
            num_compared += 1
    assert num_compared > 4000


def test_worst_case_stop_strings_are_cheap() -> None:
    """A held text advances an automaton; it is never searched again."""
    tokenizer = TOKENIZERS["byte_level"]
    letter = tokenizer.encode("a")[0]
    found = output_text(tokenizer, stop=["a" * 255 + str(i) for i in range(16)])
    deltas = [push(found, letter) for _ in range(1000)]
    assert "".join(deltas) == "a" * 745
    assert finish(found) == "a" * 255


def test_a_text_of_replacement_characters_costs_its_length() -> None:
    """A token may be U+FFFD itself, or no text at all: what a window holds back stays short."""
    backend = tokenizers.Tokenizer(models.BPE({"\ufffd": 0, "a": 1, "\ufffdb": 2}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = Tokenizer(backend, {})
    for ids in ([0] * 4000, [3] * 4000, [9] * 4000, [1, 0, 0] * 1300 + [2], [0, 2, 9, 3] * 1000):
        begin = time.process_time()
        assert stream(output_text(tokenizer), ids)[0] == tokenizer.decode(ids)
        assert time.process_time() - begin < 1


def panicking_tokenizer() -> Tokenizer:
    """The library panics when this decoder meets the token "a" alone."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Strip("a", 1, 1)
    return Tokenizer(backend, {})


def test_a_panic_of_the_library_is_an_ordinary_error() -> None:
    tokenizer = panicking_tokenizer()
    for call in (
        lambda: push(output_text(tokenizer), 0),
        lambda: push(output_text(tokenizer, prompt_ids=[0]), 1),
        lambda: tokenizer.token_text(0),
        lambda: tokenizer.decode([0]),
    ):
        with pytest.raises(RequestError, match="cannot be decoded"):
            call()
    assert push(output_text(tokenizer), 1) == "b"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70])
def test_ids_beyond_any_vocabulary(name: str, token_id: int) -> None:
    with pytest.raises(RequestError, match="cannot be decoded"):
        TOKENIZERS[name].text_stream().push(token_id)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_a_token_are_those_of_its_text_or_of_its_share_of_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    whole = [i for i in range(tokenizer.vocab_size) if "\ufffd" not in tokenizer.token_text(i)]
    assert whole and all(tokenizer.token_bytes(i) == tokenizer.token_text(i).encode() for i in whole)
    if name.startswith("byte"):
        written = b"".join(map(tokenizer.token_bytes, tokenizer.encode("ab 🙂", add_special_tokens=False)))
        assert written.decode().lstrip() == "ab 🙂"
