"""What comes out of the model reaches the reader clean, and split in thinking and answer."""

from hypothesis import given
from hypothesis import strategies as st

from qkv_engine.cli.text import Part, ReplySplitter, one_line, sanitize

MARKER = "<|im_end|>"
FRAGMENTS = st.sampled_from(["<think>", "</think>", MARKER, "<", "<th", "</", "|>", "\n", " ", "word", "é", "4"])


def split(deltas: list[str], **options: bool) -> tuple[str, str]:
    splitter = ReplySplitter([MARKER], **options)
    pieces = [piece for delta in deltas for piece in splitter.feed(delta)] + splitter.finish()
    thinking, answer = ("".join(p.text for p in pieces if p.part is part) for part in (Part.THINKING, Part.ANSWER))
    return thinking, answer


def test_escape_sequences_do_not_survive():
    hostile = "a\x1b[31mb\x1b]52;c;AAAA\x07c\x9b2Jd\x90q\x7f\r\x08\x00e"
    assert sanitize(hostile) == "a[31mb]52;c;AAAAc2Jdqe"
    assert sanitize("tab\tline\nend é漢") == "tab\tline\nend é漢"
    assert all(sanitize(chr(c)) == "" for c in [*range(9), *range(11, 32), *range(127, 160)])


def test_one_line_cannot_forge_a_second():
    assert one_line("a\nqkv-engine: error: b\x1b[2J") == "a qkv-engine: error: b[2J"


def test_thinking_is_split_from_the_answer():
    assert split(["<think>\n1+1=2\n</think>\n\n2", MARKER]) == ("\n1+1=2\n", "2")


def test_a_template_may_have_opened_the_thinking():
    assert split(["so </think> 2"], thinking=True) == ("so ", "2")


def test_prose_may_mention_the_tag():
    text = "the <think> tag and </think>"
    assert split([text]) == ("", text)


def test_a_tag_that_never_ends_is_text():
    assert split(["2 < 3 and <thi"]) == ("", "2 < 3 and <thi")
    assert split(["<thi"]) == ("", "<thi")


def test_unfinished_thinking_is_all_thinking():
    assert split(["<think>abc</thi"]) == ("abc</thi", "")


@given(st.lists(FRAGMENTS, max_size=12).map("".join), st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_every_chunking_splits_alike(text: str, sizes: list[int], thinking: bool):
    deltas, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        deltas.append(text[at : at + size])
        at, turn = at + size, turn + 1
    assert split(deltas, thinking=thinking) == split([text], thinking=thinking)
