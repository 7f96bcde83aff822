"""Text of a model reaches a terminal without control characters."""

from qkv_engine.cli.text import one_line, sanitize


def test_escape_sequences_do_not_survive():
    hostile = "a\x1b[31mb\x1b]52;c;AAAA\x07c\x9b2Jd\x90q\x7f\r\x08\x00e"
    assert sanitize(hostile) == "a[31mb]52;c;AAAAc2Jdqe"
    assert sanitize("tab\tline\nend é漢") == "tab\tline\nend é漢"
    assert all(sanitize(chr(c)) == "" for c in [*range(9), *range(11, 32), *range(127, 160)])


def test_one_line_cannot_forge_a_second():
    assert one_line("a\nqkv-engine: error: b\x1b[2J") == "a qkv-engine: error: b[2J"
