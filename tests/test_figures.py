"""Figures and limits that pages state are those of the code."""

from __future__ import annotations

import re

import pytest

from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.device import memory
from qkv_engine.kv.demand import OPEN_END_BLOCKS
from qkv_engine.scheduler.pressure import AHEAD_SHARE
from qkv_engine.serve.json_time import MAX_SECONDS

from .doc_pages import ROOT
from .sim.mutants import MUTANTS, QUICK
from .sim.mutants_cases import BUGS
from .sim.mutants_disk import DISK_BUGS, DOUBT_BUGS, HINT_BUGS
from .sim.mutants_groups import GROUP_BUGS
from .sim.mutants_host import HOST_BUGS
from .sim.mutants_resizes import RESIZE_BUGS
from .sim.mutants_shares import SHARE_BUGS
from .sim.mutants_shrinks import SHRINK_BUGS
from .sim.mutants_states import STATE_BUGS

TIER_BUGS = (*HOST_BUGS, *DISK_BUGS, *DOUBT_BUGS, *HINT_BUGS, *SHARE_BUGS)
NUM_BUGS = len(BUGS) + len(GROUP_BUGS) + len(RESIZE_BUGS) + len(SHRINK_BUGS) + len(TIER_BUGS) + len(STATE_BUGS)
STATED = {
    "docs/kv_cache.md": [
        f"less {100 * (1 - memory.GPU_SHARE):.0f} % of the GPU's total",
        f"{memory.GPU_WORKSPACE >> 30} GiB for activations",
        f"{memory.GRAPHS_NBYTES >> 30} GiB for CUDA graphs",
        f"{memory.CPU_LIMIT >> 30} GiB |",
        f"within the next {BLOCK_TOKENS // AHEAD_SHARE} steps",
        f"counted with {OPEN_END_BLOCKS * BLOCK_TOKENS:,} more tokens",
    ],
    "docs/reliability.md": [
        f"| {len(QUICK)} of {len(QUICK)} | {len(MUTANTS)} of {len(MUTANTS)};",
        f"| {NUM_BUGS} of {NUM_BUGS} |",
    ],
    "docs/serving.md": [f"more than {MAX_SECONDS * 1000:g} ms to be decoded"],
}


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, found in STATED.items() for words in found])
def test_a_page_states_what_the_code_has(page: str, words: str):
    assert words in re.sub(r"\s+", " ", (ROOT / page).read_text())
