"""Sampling kernels under Triton's interpreter: numbers of rows that differ from the reference, 0 if right."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv_engine.kernels.sample import UNSEEN, Edits, Settings, edit_reference, pack_settings, sample_reference
from qkv_engine.kernels.sample import triton as kernels
from qkv_engine.request import SamplingParams
from qkv_engine.sampling.allowed_tokens import AllowedTokens
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.sampling.sample_tables import SampleTables

from .interpreted import report

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 130, 1000]
POISONS = [math.nan, math.inf, -math.inf]


def pack(rng: random.Random, num_rows: int, vocab_size: int) -> Settings:
    """Settings at and beyond the edges of their bounds, some rows greedy."""
    k = [0, 0, 1, 2, 50, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1]
    rows = b"".join(
        pack_settings(
            rng.choice([0.0, 1e-8, 0.05, 1.0, 1.0, 3.0, 100.0]),
            rng.choice(k),
            rng.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999, 1 - 2.0**-53]),
            rng.choice([0.0, 0.0, 1e-5, 0.1, 1.0]),
            rng.randrange(-(2**63), 2**63),
        )
        for _ in range(num_rows)
    )
    table = torch.frombuffer(bytearray(rows), dtype=torch.int64).view(num_rows, -1)
    positions = torch.tensor([rng.choice([0, 1, rng.randrange(2**31)]) for _ in range(num_rows)])
    limited = bool(((table[:, 3] > 0) | (table[:, 2].contiguous().view(torch.float64) < 1)).any())
    return Settings(table, positions, limited or rng.random() < 0.5)


def make_logits(rng: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    """Sharp and flat rows, ties, masked tokens, and rows that cannot be sampled; they lie in a buffer of NaN."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([0.0, 1e-3, 0.5, 3.0, 40.0])
    if rng.random() < 0.4:
        x = x.round()
    x[torch.rand(x.shape, generator=generator) < rng.choice([0.0, 0.0, 0.2, 0.95])] = -math.inf
    buffer = torch.full((num_rows + 2, vocab_size + rng.randrange(3)), math.nan, dtype=rng.choice(DTYPES))
    logits = buffer[1:-1, :vocab_size].copy_(x)
    for row in range(num_rows):
        if rng.random() < 0.1:
            logits[row, rng.randrange(vocab_size)] = rng.choice(POISONS)
        if rng.random() < 0.05:
            logits[row] = -math.inf
    return logits


def on(device: str, x: Any) -> Any:
    """A tensor with its surrounding buffer, or a tuple of tensors, on ``device``."""
    if isinstance(x, Tensor):
        whole = x if x._base is None else x._base
        return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    return type(x)(*(on(device, part) for part in x)) if isinstance(x, Settings | Edits) else x


def differing(logits: Tensor, table: Settings | None, raw_peak: Tensor | None = None, device: str = "cpu") -> int:
    """Number of rows whose fault, or token without a fault, differs; an id beyond the vocabulary raises."""
    rows = on(device, logits)
    found = kernels.sample_triton(rows, on(device, table), on(device, raw_peak)).cpu()
    expected = sample_reference(logits, table, raw_peak)
    assert torch.equal(rows.cpu().nan_to_num(7.0), logits.nan_to_num(7.0))
    assert found.shape == expected.shape and 0 <= int(found[0].min()) <= int(found[0].max()) < logits.shape[1]
    usable = expected[1] == 0
    return int(((found[1] != expected[1]) | usable & (found[0] != expected[0])).sum())


def fuzz(sizes: list[int], keys: int, num_rows: int, programs: int, examples: int) -> Callable[[], float]:
    """Differing rows of random cases; few ``keys`` and ``programs`` make small rows take the paths of large ones."""

    def run() -> float:
        kernels.KEYS, kernels.PROGRAMS = keys, programs
        wrong: list[int] = []

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
        )
        @given(st.integers(0, 2**32), st.sampled_from(sizes), st.integers(1, num_rows))
        def check(seed: int, vocab_size: int, rows: int) -> None:
            rng = random.Random(seed)
            logits = make_logits(rng, rows, vocab_size)
            raw_peak = None
            if rng.random() < 0.3:
                raw_peak = torch.tensor([rng.choice([1.0, 1.0, *POISONS]) for _ in range(rows)])
            wrong.append(differing(logits, pack(rng, rows, vocab_size) if rng.random() < 0.9 else None, raw_peak))
            assert not wrong[-1], seed

        check()
        assert len(wrong) >= examples
        return float(sum(wrong))

    return run


def table_of(limits: list[tuple[int, float]]) -> Settings:
    """Scores as the logits are, in units of log2; one seed a row."""
    rows = b"".join(pack_settings(1 / math.log(2), k, p, 0.0, seed) for seed, (k, p) in enumerate(limits))
    return Settings(
        torch.frombuffer(bytearray(rows), dtype=torch.int64).view(len(limits), -1),
        torch.arange(len(limits)),
        True,
    )


def flat() -> float:
    """Differing rows where all tokens are alike: a nucleus is all of them, whatever its share."""
    kernels.KEYS, kernels.PROGRAMS = 2048, 8
    return float(differing(torch.zeros(4, 5000), table_of([(0, 0.5), (10, 1.0), (10, 0.5), (4999, 0.9)])))


def shares() -> float:
    """Differing rows of nuclei that end with a token, to the last unit of weight, or just behind it."""
    kernels.KEYS, kernels.PROGRAMS = 2048, 8
    one = 2.0**40
    logits = torch.tensor([0.0, -1.0, -2.0, -30.0])
    total = sum(float(2.0 ** (40 + int(x))) for x in logits)
    goals = [one + d for d in (-1, -0.5, 0, 0.5, 1)] + [1.5 * one + d for d in (-0.5, 0, 0.25, 1)]
    limits = [(k, goal / (total if k == 0 else 1.5 * one)) for goal in goals for k in (0, 2) for _ in range(3)]
    return float(differing(logits.repeat(len(limits), 1), table_of([(k, min(p, 1.0)) for k, p in limits])))


def state_of(number: float) -> int:
    """The seed's state whose first draw is ``number``: the inverse of the mixing."""
    mask = 2**64 - 1
    value = int(number * 2**53) << 11
    value ^= value >> 31 ^ value >> 62
    value = value * pow(0x94D049BB133111EB, -1, 2**64) & mask
    value ^= value >> 27 ^ value >> 54
    value = value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    value ^= value >> 30 ^ value >> 60
    return value - 0x9E3779B97F4A7C15 & mask


def edges() -> float:
    """Differing rows for numbers on the border of two tokens, in unlike tiles and in one: the later token wins."""
    kernels.KEYS, kernels.PROGRAMS = 2048, 8
    numbers = [0.0, 0.25 - 2.0**-53, 0.25, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53]
    logits = torch.full((6, 300), -math.inf)
    logits[:, [3, 130]], logits[:, 299] = -1.0, 0.0
    near = torch.full((6, 300), -math.inf)
    near[:, [129, 131]], near[:, 140] = -1.0, 0.0
    table = table_of([(0, 1.0)] * 6)
    table.rows[:, 4] = torch.tensor([state - 2**64 if state >> 63 else state for state in map(state_of, numbers)])
    table = table._replace(positions=torch.zeros(6, dtype=torch.int64))
    assert kernels.sample_triton(logits, table, None)[0].tolist() == [3, 3, 130, 130, 299, 299]
    assert kernels.sample_triton(near, table, None)[0].tolist() == [129, 129, 131, 131, 140, 140]
    return float(differing(logits, table) + differing(near, table))


def make_edits(rng: random.Random, num_rows: int, vocab_size: int) -> Edits:
    """Fixed entries, penalties and bans of random tokens; a kind may be missing."""
    rows, tokens, counts, biases, ends = array("i"), array("i"), array("i"), array("f"), []
    for kind in range(3):
        for row in range(num_rows) if rng.random() < 0.8 else ():
            for token in rng.sample(range(vocab_size), rng.randrange(min(vocab_size, 300))):
                rows.append(row)
                tokens.append(token)
                counts.append(rng.randrange(4) if kind == 1 else UNSEEN)
                biases.append((rng.uniform(-9, 9), 0.0, -math.inf)[kind])
        ends.append(len(rows))
    pick = lambda *values: rng.choice(values)  # noqa: E731
    penalties = [(pick(1.0, 1.3, 0.7), pick(0.0, 0.3), pick(0.0, -1.1), pick(0, 0, 1)) for _ in range(num_rows)]
    columns = (torch.tensor(column.tolist(), dtype=torch.int32) for column in (rows, tokens, counts))
    return Edits(torch.tensor(penalties).float(), *columns, torch.tensor(biases.tolist()).float(), tuple(ends))


def edits(seed: int, device: str = "cpu") -> float:
    rng = random.Random(seed)
    num_rows, vocab_size = rng.randrange(1, 6), rng.choice([7, 130, 3000])
    kernels.PROGRAMS = rng.choice([1, 16])
    logits, table = make_logits(rng, num_rows, vocab_size), make_edits(rng, num_rows, vocab_size)
    found, peak = (x.cpu() for x in kernels.edit_triton(on(device, logits), on(device, table)))
    expected, raw_peak = edit_reference(logits, table)
    finite = raw_peak.isfinite()
    assert torch.equal(peak.isfinite(), finite) and torch.equal(peak[finite], raw_peak[finite])
    return float((~((found == expected) | found.isnan() & expected.isnan())).sum())


def foreign_tokens(device: str = "cpu") -> float:
    """Changes by entries whose token is no column: none to the next row, none around the tensor."""
    num_rows, vocab_size, bad = 3, 7, [7, 8, 13, 14, 21, 1000, 2**31 - 1, -1, -7, -(2**31)]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    rows = torch.tensor([row for row in range(num_rows) for _ in (*bad, 3)], dtype=torch.int32)
    tokens = torch.tensor([*bad, 3] * num_rows, dtype=torch.int32)
    penalties = torch.tensor([[1.5, 0.5, 0.5, 0.0]] * num_rows)
    wrong = 0
    for kind in range(3):
        ends = tuple(0 if end < kind else len(rows) for end in range(3))
        counts = torch.full_like(rows, 1 if kind == 1 else UNSEEN)
        biases = torch.full((len(rows),), (2.0, 0.0, -math.inf)[kind])
        table = Edits(penalties, rows, tokens, counts, biases, ends)
        good = tokens == 3
        only_good = Edits(
            *(penalties, rows[good], tokens[good], counts[good], biases[good]),
            tuple(0 if end < kind else num_rows for end in range(3)),
        )
        found, _ = (x.cpu() for x in kernels.edit_triton(on(device, logits), on(device, table)))
        wrong += int((found != edit_reference(logits, only_good)[0]).sum())
    return float(wrong)


def rules(device: str = "cpu") -> float:
    """Logits that requests' own rules leave wrongly, beside what the rules say in plain words."""
    wrong, vocab_size, tokens = 0, 300, [5, 6, 7, 5, 6, 7, 5]
    functions = {"to_7": lambda output: [7], "no_rule": lambda output: None, "first": lambda output: {output[0], 299}}
    asked: list[tuple[dict[str, Any], Callable[[list[int]], Any] | None, Callable[[int], bool]]] = [
        ({}, None, lambda token: True),
        ({"no_repeat_ngram_size": 1}, None, lambda token: token not in (5, 6, 7)),
        ({"no_repeat_ngram_size": 3}, None, lambda token: token != 6),
        ({}, functions["to_7"], lambda token: token == 7),
        ({"no_repeat_ngram_size": 2}, functions["no_rule"], lambda token: token != 6),
        ({"allowed_token_ids": [6, 7, 8]}, functions["first"], lambda token: token == 7),
        ({"logit_bias": {299: 3.0}, "no_repeat_ngram_size": 4}, functions["first"], lambda token: token in (7, 299)),
    ]
    rows = [
        SampleRow(SamplingParams(**fields), 0, tokens, 2, chooser=function and AllowedTokens(function, vocab_size))
        for fields, function, _ in asked
    ]
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(4))
    tables = SampleTables.pack(rows)
    assert tables is not None
    _, table = tables.on(torch.device(device))
    assert table is not None
    for found in (edit_reference(on(device, logits), table)[0], kernels.edit_triton(on(device, logits), table)[0]):
        for i, (fields, _, may_come) in enumerate(asked):
            biases = fields.get("logit_bias", {})
            expected = [x + biases.get(j, 0) if may_come(j) else -math.inf for j, x in enumerate(logits[i].tolist())]
            wrong += int((found[i].cpu() != torch.tensor(expected)).sum())
    return float(wrong)


cases = {
    "small": fuzz(SIZES, 2048, 5, 16, 20),
    "narrow lists": fuzz([130, 1000], 16, 4, 16, 10),
    "many shares": fuzz([4999, 12345], 64, 2, 64, 5),
    "one share": fuzz([4999], 512, 3, 1, 4),
    "flat": flat,
    "shares": shares,
    "edges": edges,
    "edits": lambda: sum(map(edits, range(12))),
    "foreign tokens": foreign_tokens,
    "rules": rules,
}

if __name__ == "__main__":
    report(cases)
