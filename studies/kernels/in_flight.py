"""Registers that tensor cores may still read when another instruction writes them, in machine code of Hopper.

An asynchronous product (``HGMMA``) reads the registers of its left operand until a ``WARPGROUP.DEPBAR`` has waited for
its group. Triton 3.6 and 3.7 lose count of them where a loop begins again (triton-lang/triton#9433), 3.9 does not.
"""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.M)
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+),")  # of others the left operand lies in shared memory
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
BRANCH = re.compile(r"BRA\S*\s.*?0x([0-9a-f]+)")
WRITE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(?:U?P\w+, )?R(\d+)\b")
READ_ONLY = ("ST", "RED", "BAR", "LDGSTS", "HGMMA", "ISETP", "FSETP", "HSETP", "R2P")  # no register is their result
LEFT_REGISTERS = 4
BEHIND = 200  # instructions behind a loop that are looked at, too


def overwritten(sass: str) -> int:
    """Instructions of a kernel's ``cuobjdump -sass`` that may write what a product under way reads."""
    code = [(int(address, 16), text) for address, text in INSTRUCTION.findall(sass)]
    places, found = {address: i for i, (address, _) in enumerate(code)}, set[int]()
    for end, (_, text) in enumerate(code):
        branch = BRANCH.search(text)
        start = places.get(int(branch.group(1), 16), end) if branch else end
        if start < end:
            steps = code[start : end + 1]
            found |= _overwriting(steps + steps + code[end + 1 : end + 1 + BEHIND])
    return len(found)


def _overwriting(code: list[tuple[int, str]]) -> set[int]:
    """Their addresses in ``code``, which runs from first to last."""
    groups, found = [set[int]()], set[int]()  # registers of each group of products under way, the last one open
    for address, text in code:
        if product := PRODUCT.search(text):
            first = int(product.group(1))
            groups[-1] |= set(range(first, first + LEFT_REGISTERS))
        elif _written(text) & set().union(*groups):
            found.add(address)
        if "HGMMA" in text and "gsb0" in text:
            groups.append(set())
        if wait := WAIT.search(text):
            groups = groups[max(0, len(groups) - 1 - int(wait.group(1), 16)) :]
    return found


def _written(text: str) -> set[int]:
    """Registers that an instruction writes."""
    match = WRITE.match(text)
    if not match or match.group(1).startswith(READ_ONLY):
        return set()
    name, first = match.group(1), int(match.group(2))
    size = 4 if ".128" in name or name.endswith("M88.4") else 2 if ".64" in name or name.startswith("CS2R") else 1
    return set(range(first, first + (2 if ".WIDE" in name else size)))
