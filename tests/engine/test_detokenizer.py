"""Streamed text equals decoding everything at once and cutting it at the first stop string."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

import qkv_engine
from qkv_engine.errors import RequestError
from qkv_engine.text.detokenizer import Detokenizer
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


def stream(detokenizer: Detokenizer, ids: list[int]) -> tuple[str, list[str]]:
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None:
            break
    deltas.append(detokenizer.finish())
    return "".join(deltas), deltas


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_full_decode(name: str, skip: bool) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(f"{name}{skip}")
    for _ in range(6000):
        ids = random_ids(rng, tokenizer, rng.randrange(24))
        text, deltas = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
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
        detokenizer = Detokenizer(tokenizer, stop=stops, include_stop_str_in_output=keep)
        streamed, _ = stream(detokenizer, ids)
        match = first_match(text, stops)
        if match is None:
            assert (streamed, detokenizer.stopped) == (text, None)
        else:
            end, start, stop = match
            assert (streamed, detokenizer.stopped) == (text[: end if keep else start], stop), (ids, stops)
            assert detokenizer.push(ids[0]) == detokenizer.finish() == ""
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
    detokenizer = Detokenizer(tokenizer, stop=stops, min_tokens=min_tokens)
    streamed, deltas = stream(detokenizer, ids)
    ends = [(end, start, text[start:end]) for end in range(min_tokens + 1, len(text) + 1) for start in range(end)]
    match = min(((end, start) for end, start, part in ends if part in stops), default=None)
    assert streamed == (text if match is None else text[: match[1]])
    # What is held back may still become a stop string, so it is shorter than the longest.
    given_out = 0
    for i, delta in enumerate(deltas[:-1]):
        given_out += len(delta)
        if detokenizer.stopped is None:
            assert i + 1 - given_out <= max(map(len, stops))


def test_half_a_character_waits_and_a_broken_one_is_replaced() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    smile, letter = tokenizer.encode("🙂"), tokenizer.encode("a")[0]
    assert len(smile) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in smile] == ["", "", "", "🙂"]
    assert [detokenizer.push(i) for i in smile[:2]] == ["", ""]
    assert detokenizer.push(letter) == "\ufffda"
    assert detokenizer.push(smile[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_one_bad_byte_spoils_its_run() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    run = [3 + byte for byte in "é".encode()]
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push(i) for i in [*run, 3 + 0xFF, 262]]
    assert deltas == ["", "", "", "\ufffd\ufffd\ufffdb"]
    assert "".join(deltas) == tokenizer.decode([*run, 3 + 0xFF, 262])


def test_leading_space_is_kept_after_a_prompt() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    the, bos = 260, 1
    assert stream(Detokenizer(tokenizer), [the, the])[0] == "the the"
    assert stream(Detokenizer(tokenizer, prompt_ids=[bos]), [the])[0] == "the"
    assert stream(Detokenizer(tokenizer, prompt_ids=[bos, the]), [the])[0] == " the"
    suffix, a, start = TOKENIZERS["suffix"], 0, 8
    assert stream(Detokenizer(suffix), [a, a])[0] == "a a"
    assert stream(Detokenizer(suffix, prompt_ids=[a, start]), [start, a])[0] == " a"
    window = TOKENIZERS["metaspace"]
    assert stream(Detokenizer(window, prompt_ids=[the, the]), [the])[0] == " the"


def test_stop_string_inside_a_byte_run_is_found_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    detokenizer = Detokenizer(tokenizer, stop=["🙂"])
    assert [detokenizer.push(3 + byte) for byte in "x🙂y".encode()] == [""] * 6
    assert detokenizer.finish() == "x"
    assert detokenizer.stopped == "🙂"


def test_worst_case_stop_strings_are_cheap() -> None:
    """A held text advances an automaton; it is never searched again."""
    tokenizer = TOKENIZERS["byte_level"]
    letter = tokenizer.encode("a")[0]
    detokenizer = Detokenizer(tokenizer, stop=["a" * 255 + str(i) for i in range(16)])
    deltas = [detokenizer.push(letter) for _ in range(1000)]
    assert "".join(deltas) == "a" * 745
    assert detokenizer.finish() == "a" * 255


def test_a_text_of_replacement_characters_costs_its_length() -> None:
    """A token may be U+FFFD itself, or no text at all: what a window holds back stays short."""
    backend = tokenizers.Tokenizer(models.BPE({"\ufffd": 0, "a": 1, "\ufffdb": 2}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = Tokenizer(backend, {})
    for ids in ([0] * 4000, [3] * 4000, [9] * 4000, [1, 0, 0] * 1300 + [2], [0, 2, 9, 3] * 1000):
        begin = time.process_time()
        assert stream(Detokenizer(tokenizer), ids)[0] == tokenizer.decode(ids)
        assert time.process_time() - begin < 1


def panicking_tokenizer() -> Tokenizer:
    """The library panics when this decoder meets the token "a" alone."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Strip("a", 1, 1)
    return Tokenizer(backend, {})


def test_a_panic_of_the_library_is_an_ordinary_error() -> None:
    tokenizer = panicking_tokenizer()
    for call in (
        lambda: Detokenizer(tokenizer).push(0),
        lambda: Detokenizer(tokenizer, prompt_ids=[0]).push(1),
        lambda: tokenizer.token_text(0),
        lambda: tokenizer.decode([0]),
    ):
        with pytest.raises(RequestError, match="cannot be decoded"):
            call()
    assert Detokenizer(tokenizer).push(1) == "b"


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
