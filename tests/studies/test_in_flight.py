"""Registers of products under way that other instructions write, found in machine code."""

from __future__ import annotations

import pytest

from studies.kernels.in_flight import overwritten

LOAD, WAIT, ALL = "LDS.U16 R17, [R9+UR4]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
FIRST, SECOND = (f"HGMMA.64x64x16.F32.BF16 R24, R{left}, gdesc[UR16], R24, gsb0" for left in (12, 16))


def kernel(*loop: str, behind: tuple[str, ...] = (WAIT, "EXIT")) -> str:
    """A listing of instructions, ``loop`` between the first and those ``behind``."""
    code = ["MOV R1, c[0x0][0x28]", *loop, "@P0 BRA 0x10", *behind]
    return "\n".join(f"        /*{16 * i:04x}*/                   {text} ;   /* 0x0 */" for i, text in enumerate(code))


@pytest.mark.parametrize(
    ("loop", "number"),
    [
        ((LOAD, SECOND), 1),  # in the next round, before any wait
        ((LOAD, SECOND, WAIT), 0),
        ((WAIT, LOAD, SECOND), 0),
        ((SECOND, LOAD, WAIT), 1),
        ((LOAD, FIRST), 0),  # reads other registers
        ((LOAD, SECOND, FIRST, ALL), 0),  # the second group alone is left
        ((LOAD, FIRST, SECOND, ALL), 1),
        (("LDS.128 R16, [R9]", SECOND), 1),
        (("LDS.128 R20, [R9]", "CS2R R14, SRZ", SECOND), 0),
        (("ISETP.GE.AND P0, PT, R17, R3, PT", "STS [R17], R16", SECOND), 0),  # read them, too
        (("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", LOAD), 0),  # left operands in shared memory
    ],
)
def test_what_a_product_reads_is_not_written_before_a_wait(loop: tuple[str, ...], number: int):
    assert overwritten(kernel(*loop)) == number


def test_instructions_behind_a_loop_count():
    assert overwritten(kernel(SECOND, behind=("MOV R18, 0x3f80", WAIT))) == 1
    assert overwritten(kernel(SECOND, behind=(WAIT, "MOV R18, 0x3f80"))) == 0
