"""A tokenizer whose components could blow a text up is refused; those that real models ship are not."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

import qkv_engine
from qkv_engine.errors import ModelError, RequestError
from qkv_engine.text.tokenizer import Tokenizer
from qkv_engine.text.tokenizer_parts import MAX_TOKEN_ID, check_tokenizer

DEMO = Path(qkv_engine.__file__).parent / "assets" / "demo"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
GPT4 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def byte_level(*specials: AddedToken) -> tokenizers.Tokenizer:
    """GPT-2, Llama-3, Qwen, Phi-4: bytes as characters."""
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials or [AddedToken("<s>", special=True)]))
    start = backend.token_to_id("<s>") or 0
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", start)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def byte_fallback(normalizer: Any) -> tokenizers.Tokenizer:
    """Llama-2, Mistral, Gemma, Phi-3: SentencePiece with a token for each byte."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "▁": 257, "a": 258, "▁a": 259}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def precompiled(longest: int) -> normalizers.Normalizer:
    """A SentencePiece character map, with an empty trie and one replacement."""
    charsmap = (4096).to_bytes(4, "little") + bytes(4096) + b"x" * longest + b"\0"
    state = {"type": "Precompiled", "precompiled_charsmap": b64encode(charsmap).decode()}
    return read_part("normalizer", state).normalizer


def read_part(name: str, state: dict[str, Any]) -> tokenizers.Tokenizer:
    source = json.loads(byte_level().to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**source, name: state}))


PREPEND = normalizers.Prepend("▁")
SPACE = normalizers.Replace(" ", "▁")
XLM = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
NFC = byte_level()
NFC.normalizer = normalizers.NFC()
REAL = {
    "gpt2": (byte_level(), 1),
    "qwen": (NFC, 4),
    "llama2": (byte_fallback(normalizers.Sequence([PREPEND, SPACE])), 1),
    "gemma": (byte_fallback(SPACE), 1),
    "mistral": (byte_fallback(None), 1),
    "xlm": (byte_fallback(normalizers.Sequence([precompiled(33), *XLM])), None),
    "bert": (byte_fallback(normalizers.BertNormalizer()), None),
}


@pytest.mark.parametrize("name", REAL)
def test_real_shapes_load(name: str) -> None:
    backend, shortening = REAL[name]
    limits = check_tokenizer(backend)
    longest = max(map(len, backend.get_vocab()))
    assert limits.chars_per_token == (None if shortening is None else shortening * longest)
    assert limits.max_chars >= 400_000 and limits.vocab_size == backend.get_vocab_size()
    text = "a a  é🙂\n"
    assert Tokenizer(backend, {}).decode(Tokenizer(backend, {}).encode(text)) is not None


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama2", "gemma", "mistral"])
def test_no_text_of_the_bound_has_fewer_tokens(name: str) -> None:
    """The bound on characters a token must never refuse a text that fits."""
    tokenizer = Tokenizer(REAL[name][0], {})
    for text in (" " * 500, "a" * 500, "e\u0301" * 500, "🙂" * 200, "가" * 300, "▁" * 300, " a" * 300, "\n\n" * 300):
        number = len(tokenizer.encode(text))
        assert tokenizer.encode(text, max_tokens=number)


def test_spaces_that_a_token_swallows_do_not_count() -> None:
    tokenizer = Tokenizer(byte_level(AddedToken("<s>", special=True, rstrip=True)), {})
    text = "<s>" + " " * 100
    assert len(tokenizer.encode(text, max_tokens=2)) == 2
    with pytest.raises(RequestError, match="more than 2 tokens"):
        tokenizer.encode("x" * 100, max_tokens=2)


def sequence(part: Any, number: int) -> Any:
    return {"type": "Sequence", "normalizers": [part] * number, "decoders": [part] * number, "pretokenizers": [part]}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "s", "type_id": 0}}
BOMBS = [
    ("normalizer", sequence(replace({"String": "a"}, "a" * 1000), 4)),
    ("normalizer", sequence(replace({"Regex": ""}, "x"), 20)),
    ("normalizer", sequence(sequence(replace({"String": "a"}, "a" * 100), 2), 2)),
    ("normalizer", sequence({"type": "Prepend", "prepend": "x"}, 100)),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 1000}),
    ("normalizer", sequence({"type": "Lowercase"}, 1000)),
    ("post_processor", {**TEMPLATE, "single": [TEXT] * 20_000}),
    ("post_processor", {**TEMPLATE, "single": [TEXT] * 2}),
    (
        "post_processor",
        {
            **TEMPLATE,
            "single": [TEXT, *[SPECIAL] * 10],
            "special_tokens": {"s": {"id": "s", "ids": [0] * 1000, "tokens": ["<s>"] * 1000}},
        },
    ),
    ("decoder", sequence(replace({"Regex": ""}, "x"), 26)),
    ("decoder", replace({"Regex": "(a|aa)+$"}, "x")),
    ("decoder", replace({"String": ""}, "x" * 1000)),
    ("decoder", replace({"String": "a"}, "x" * 50_000_000)),
    ("decoder", sequence(replace({"String": "a"}, "aa"), 20)),
    ("decoder", sequence({"type": "Fuse"}, 1000)),
]


@pytest.mark.parametrize(("name", "state"), BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_refused(name: str, state: dict[str, Any]) -> None:
    backend = read_part(name, state)
    begin = time.process_time()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(backend, {})
    assert time.process_time() - begin < 2


def test_a_character_map_with_a_long_replacement_is_refused() -> None:
    backend = byte_level()
    backend.normalizer = precompiled(10_000)
    with pytest.raises(ModelError, match="lengthen"):
        Tokenizer(backend, {})


def test_a_text_is_the_shorter_the_more_it_may_grow() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Replace("a", "b" * 200)
    tokenizer = Tokenizer(backend, {})
    assert len(tokenizer.encode("a" * 100, add_special_tokens=False)) == 20_000
    with pytest.raises(RequestError, match="characters"):
        tokenizer.encode("a" * 200_000)


@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1, MAX_TOKEN_ID + 1])
@pytest.mark.parametrize("is_added", [True, False])
def test_ids_out_of_bounds_are_refused(token_id: int, is_added: bool) -> None:
    source = json.loads(byte_level().to_str())
    if is_added:
        source["added_tokens"].append({**source["added_tokens"][0], "id": token_id, "content": "<x>"})
        source["model"]["vocab"]["<x>"] = token_id
    else:
        source["model"]["vocab"]["zz"] = token_id
    backend = tokenizers.Tokenizer.from_str(json.dumps(source))
    begin = time.process_time()
    with pytest.raises(ModelError, match="larger"):
        Tokenizer(backend, {})
    assert time.process_time() - begin < 1


def test_the_largest_id_allowed_is_spelled_out_soon() -> None:
    source = json.loads(byte_level().to_str())
    source["model"]["vocab"]["zz"] = MAX_TOKEN_ID
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(source)), {}, "{{ messages[0].content }}")
    begin = time.process_time()
    text, ids = tokenizer.chat_prompt([{"role": "user", "content": "<s>"}])
    assert text == "<s>" and tokenizer.decode(ids) == "<s>" and len(ids) == 3
    assert time.process_time() - begin < 2
    tokenizer.close()


def test_a_special_token_that_is_too_long_is_refused() -> None:
    with pytest.raises(ModelError, match="special token"):
        Tokenizer(byte_level(AddedToken("x" * 200, special=True)), {})


def test_thousands_of_special_tokens_are_searched_at_once() -> None:
    specials = [AddedToken(f"<|{i}|>", special=True) for i in range(3000)]
    tokenizer = Tokenizer(byte_level(*specials), {}, "{{ messages[0].content }}")
    begin = time.process_time()
    assert tokenizer._marks.mark("<|" * 300_000) == "<|" * 300_000
    assert time.process_time() - begin < 2
    text, ids = tokenizer.chat_prompt([{"role": "user", "content": "<|7|><|77|><|2999|><|3000|>"}])
    assert text == "<|7|><|77|><|2999|><|3000|>" and tokenizer.special_ids.isdisjoint(ids)
    tokenizer.close()


class PanicException(BaseException):
    """What a Rust panic looks like."""


class BrokenCopy:
    """A backend that panics when it is written out."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def to_str(self) -> str:
        raise PanicException("boom")


def test_a_tokenizer_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level(), {}, "{{ messages[0].content }}")
    monkeypatch.setattr(tokenizer, "_backend", BrokenCopy(tokenizer._backend))
    with pytest.raises(ModelError, match="boom"):
        tokenizer.chat_prompt([{"role": "user", "content": "<s>"}])
    tokenizer.close()
