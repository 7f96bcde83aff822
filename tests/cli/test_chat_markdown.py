"""Blocks come out when they are finished, never before, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv_engine.cli.chat.markdown import MarkdownBlocks

FRAGMENTS = st.sampled_from(
    [
        "```",
        "```python",
        "~~~",
        "````",
        "\n",
        "\n\n",
        "- a",
        "1. b",
        "  ",
        "    ",
        "# h",
        "> q",
        "| a |",
        "word",
        "*",
        "`",
    ]
)


def blocks(text: str, step: int = 1) -> list[str]:
    splitter = MarkdownBlocks()
    done = [block for at in range(0, len(text), step) for block in splitter.feed(text[at : at + step])]
    return done + splitter.finish()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\ntwo\n", ["one\n\n", "two\n"]),
        ("# h\ntext\n# h2\n", ["# h\n", "text\n", "# h2\n"]),
        ("a\n```py\nx\n\ny\n```\nb", ["a\n", "```py\nx\n\ny\n```\n", "b"]),
        ("````\n```\n````\nb", ["````\n```\n````\n", "b"]),
        ("~~~\n```\n~~~\nb", ["~~~\n```\n~~~\n", "b"]),
        ("- a\n\n- b\n\n  more\n\nend", ["- a\n\n- b\n\n  more\n\n", "end"]),
        (
            "1. a\n\n   ```\n   x\n\n   y\n   ```\n\n2. b\n",
            ["1. a\n\n   ```\n   x\n\n   y\n   ```\n\n2. b\n"],
        ),
        ("```\nnever closed\n\n", ["```\nnever closed\n\n"]),
        ("\n\na\n\n", ["\n\na\n\n"]),
        ("", []),
    ],
)
def test_blocks(text: str, expected: list[str]):
    assert blocks(text) == expected


def test_a_block_comes_as_soon_as_it_is_finished():
    splitter = MarkdownBlocks()
    assert splitter.feed("one\n\n") == []
    assert splitter.feed("two\n") == ["one\n\n"]
    assert splitter.feed("```\nx\n```") == ["two\n"]
    assert splitter.feed("\n") == ["```\nx\n```\n"]
    assert splitter.tail == ""


@given(st.lists(FRAGMENTS, max_size=20).map("".join), st.integers(1, 9))
def test_nothing_is_lost_and_chunking_does_not_matter(text: str, step: int):
    done = blocks(text, step)
    assert "".join(done) == text
    assert done == blocks(text, len(text) or 1)


@given(st.lists(st.sampled_from(["x", "", "# h", "- a", "| b |"]), max_size=8), st.sampled_from(["```", "~~~~"]))
def test_a_fence_is_never_split(lines: list[str], fence: str):
    code = "\n".join([f"{fence}py", *lines, fence, ""])
    assert code in blocks(f"before\n\n{code}\nafter\n")


def test_the_preview_of_a_long_fence_is_its_end():
    splitter = MarkdownBlocks()
    splitter.feed("text\n\n```py\n" + "".join(f"{n}\n" for n in range(50)) + "par")
    assert splitter.preview(3) == "```py\n47\n48\n49\npar"
    assert splitter.preview(60) == splitter.tail
