"""The demo model in the package: complete, as its training script writes it, and the same network."""

import filecmp
import warnings
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from qkv_engine import Engine, SamplingParams
from qkv_engine.bench import tasks
from studies import train_demo
from studies.chat_turns import right_by_turn

FOLDER = Path(str(files("qkv_engine") / "assets" / "demo"))
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def model() -> train_demo.Model:
    return train_demo.load(FOLDER).eval()


def test_the_package_holds_the_model_and_nothing_else() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"assets/demo/*"' in declared


def test_export_writes_these_very_files(model: train_demo.Model, tmp_path: Path) -> None:
    train_demo.export(model, train_demo.load_tokenizer(FOLDER / "tokenizer.json"), tmp_path)
    for name in FILES - {"tokenizer.json"}:
        assert filecmp.cmp(tmp_path / name, FOLDER / name, shallow=False), name


def test_the_training_model_and_the_engine_agree(model: train_demo.Model, demo_engine: Engine) -> None:
    prompt = demo_engine.tokenizer.encode("<|im_start|>user\nWhat is 512+49?<|im_end|>\n<|im_start|>assistant\n")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    generated = demo_engine.generate([prompt], params)[0].outputs[0].token_ids
    ids = torch.tensor([prompt + generated])
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # flex_attention says it is not compiled
        mask = train_demo.document_mask(torch.zeros_like(ids))
        logits = model(ids, torch.arange(ids.shape[1])[None], mask)
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == generated


def test_later_questions_of_a_chat_are_right_as_often_as_the_first(demo_engine: Engine) -> None:
    right = right_by_turn(demo_engine, chats=3)
    assert right[0] == 3 and min(right) >= 2, right


def test_attention_by_documents_equals_the_mask(model: train_demo.Model) -> None:
    """The form of a CPU's training: documents one at a time."""
    documents = torch.tensor([[0] * 5 + [1] * 3 + [-1] * 4, [2] * 12])
    ids, positions = torch.arange(24).view(2, 12), torch.tensor([[*range(5), *range(3), *[0] * 4], [*range(12)]])
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # flex_attention says it is not compiled
        expected = model(ids, positions, train_demo.document_mask(documents))
        found = model(ids, positions, train_demo.document_spans(documents))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_returned_chat_has_no_reasoning_but_its_last() -> None:
    turns = [("What is 1+2?", "1+2: so 3", "3"), ("hi", "", "Hello!"), ("What is 2+2?", "2+2: so 4", "4")]
    pieces = tasks.returned_text(turns, "Answer briefly.")
    text = "".join(piece for piece, _ in pieces)
    assert text.startswith("<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nWhat is 1+2?<|im_end|>\n")
    assert "assistant\n3<|im_end|>" in text and text.count("<think>") == 1
    assert [piece for piece, own in pieces if own] == ["<think>\n2+2: so 4\n</think>\n\n4<|im_end|>"]


def test_training_rows_are_full_and_documents_start_at_position_zero() -> None:
    rows = iter(train_demo.PackedData(FOLDER / "tokenizer.json", length=600, max_size=5, seed=1))
    for row in (next(rows) for _ in range(5)):
        ids, documents, positions, own = row
        assert row.shape == (4, 601)
        starts = positions == 0
        assert starts.sum() == len(documents.unique())
        assert not own[documents == -1].any() and not ids[documents == -1].any()
        assert 0 < own.sum() < 601
