"""What formats of recurrent states lose: ``python -m studies.state_formats``, then with ``--model FOLDER`` on a hybrid.

Without a model, heads of a gated delta-net take random tokens one by one, and their states are rounded behind each. A
row is a format, a figure the error of what the last third of the tokens read, relative to states that are not rounded.
With a model, the divergence of its next tokens under teacher forcing, each token a step of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine import Engine
from qkv_engine.bench.divergence import DivergencePlan, measure_divergence
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.kernels.delta_net.formats import INT8, INT16, decode, encode
from qkv_engine.kernels.delta_net.reference import unit

DIM = 128  # of keys and of values
KEPT = (0.99, 0.999, 0.9999, 1.0)  # of a state by a token
RATES = (0.003, 0.03, 0.3)  # of writing
DRIFT = 0.3  # spread of values around a mean, where they have one

Rounded = tuple[Tensor, Tensor]  # a state as it is read, and what is carried to the next token
Format = Callable[[Tensor, Tensor], Rounded]


def cast(dtype: torch.dtype, state: Tensor, carried: Tensor) -> Rounded:
    """A float of 16 bits."""
    return state.to(dtype).float(), carried


def cast_randomly(bits: int, state: Tensor, carried: Tensor) -> Rounded:
    """A float with ``bits`` of significand, up or down by chance, so that the mean is kept."""
    _, exponent = torch.frexp(state)
    step = torch.ldexp(torch.ones_like(state), exponent - bits)
    return torch.floor(state / step + torch.rand_like(state)) * step, carried


def engine_codes(state: Tensor, carried: Tensor, *, bits: int) -> Rounded:
    """The engine's own codes."""
    return decode(encode(state, INT8 if bits == 8 else INT16)), carried


def codes(
    levels: int, state: Tensor, carried: Tensor, *, dim: int | tuple[int, int] = 1, at_random: bool = False
) -> Rounded:
    """Codes with a scale for each run of elements along ``dim``."""
    step = state.abs().amax(dim, keepdim=True).clamp_min(1e-30) / levels
    found = torch.floor(state / step + (torch.rand_like(state) if at_random else 0.5))
    return found.clamp(-levels, levels) * step, carried


def codes_with_dither(levels: int, state: Tensor, carried: Tensor) -> Rounded:
    """Codes of the state plus noise that a reader knows and takes off again."""
    step, noise = state.abs().amax(1, keepdim=True).clamp_min(1e-30) / levels, torch.rand_like(state)
    return (torch.floor(state / step + noise) - noise + 0.5) * step, carried


def codes_with_feedback(carried_bits: int | None, state: Tensor, carried: Tensor) -> Rounded:
    """Codes of 8 bits whose error is carried to the next token, in ``carried_bits`` or exactly."""
    wanted = state + carried
    step = state.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    found = torch.round(wanted / step).clamp(-127, 127) * step
    error = (wanted - found) / step
    if carried_bits is not None:
        half = 1 << carried_bits - 1
        error = torch.round(error * 2 * half).clamp(-half, half - 1) / (2 * half)
    return found, error * step


FORMATS: dict[str, tuple[float, Format]] = {  # bits of an element with a state of 128 x 128, scales counted
    "bfloat16": (16, partial(cast, torch.bfloat16)),
    "bfloat16, at random": (16, partial(cast_randomly, 8)),
    "float16": (16, partial(cast, torch.float16)),
    "float16, at random": (16, partial(cast_randomly, 11)),
    "int16": (16.25, partial(engine_codes, bits=16)),
    "12 bits": (12.25, partial(codes, 2047)),
    "8 bits, error of 4 bits fed back": (12.25, partial(codes_with_feedback, 4)),
    "8 bits, error fed back exactly": (40.25, partial(codes_with_feedback, None)),
    "int8": (8.25, partial(engine_codes, bits=8)),
    "8 bits, a scale a row": (8.25, partial(codes, 127, dim=2)),
    "8 bits, a scale a head": (8.002, partial(codes, 127, dim=(1, 2))),
    "8 bits, at random": (8.25, partial(codes, 127, at_random=True)),
    "8 bits, dithered": (8.25, partial(codes_with_dither, 127)),
}


class Tokens(NamedTuple):
    """What heads [H] take of a token: q, k [H, DIM] of length 1 and v [H, 1, DIM]."""

    q: Tensor
    k: Tensor
    v: Tensor


def advance(state: Tensor, token: Tokens, kept: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """The states [H, DIM, DIM] behind a token, and what it reads [H, DIM]."""
    state = state * kept
    state = state + token.k[:, :, None] * ((token.v - token.k[:, None] @ state) * rate)
    return state, (token.q[:, None] @ state)[:, 0]


@torch.no_grad()
def simulate(names: list[str], num_tokens: int, drift: bool) -> dict[str, Tensor]:
    """Relative errors of the formats ``names`` by ``KEPT`` and ``RATES``."""
    kept, rate = (x.reshape(-1, 1, 1) for x in torch.meshgrid(torch.tensor(KEPT), torch.tensor(RATES), indexing="ij"))
    heads, bias = len(kept), torch.randn(len(kept), DIM) / 2
    mean = torch.randn(heads, 1, DIM) if drift else torch.zeros(heads, 1, DIM)
    exact = torch.zeros(heads, DIM, DIM)
    states = dict.fromkeys(names, (exact, exact))
    wrong, whole = {name: torch.zeros(heads) for name in names}, torch.zeros(heads)
    for number in range(num_tokens):
        q, k = (unit(F.silu(torch.randn(heads, DIM) + bias)) for _ in range(2))
        token = Tokens(q, k, mean + torch.randn(heads, 1, DIM) * (DRIFT if drift else 1))
        exact, wanted = advance(exact, token, kept, rate)
        is_counted = 3 * number >= 2 * num_tokens
        whole += is_counted * wanted.square().sum(-1)
        for name in names:
            state, read = advance(states[name][0], token, kept, rate)
            states[name] = FORMATS[name][1](state, states[name][1])
            wrong[name] += is_counted * (read - wanted).square().sum(-1)
    return {name: (wrong[name] / whole).sqrt().view(len(KEPT), len(RATES)) for name in names}


def show(found: dict[str, Tensor]) -> None:
    """A table in Markdown: per cent, a column for each pair of what a token keeps and the rate of writing."""
    print("| format | bits | " + " | ".join(f"{kept:g}, {rate:g}" for kept in KEPT for rate in RATES) + " |")
    print("|---" * (2 + len(KEPT) * len(RATES)) + "|")
    for name, errors in found.items():
        cells = " | ".join(f"{100 * error:.2g}" for error in errors.flatten().tolist())
        print(f"| {name} | {FORMATS[name][0]:g} | {cells} |")


def measure(model: Path, questions: str, samples: int) -> None:
    """Divergence of formats of states and of KV from float32 states beside KV of 16 bits, a token a step."""
    options = {
        "float32, bf16": ("float32", "bf16"),
        "int16, bf16": ("int16", "bf16"),
        "int8, bf16": ("int8", "bf16"),
        "float32, int8": ("float32", "int8"),
        "float32, int4": ("float32", "int4"),
        "int8, int4": ("int8", "int4"),
    }

    def engine(name: str) -> Engine:
        state_dtype, kv = options[name]
        limits: dict[str, Any] = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "num_threads": 1}
        return Engine(model, kv=kv, state_dtype=state_dtype, device="cpu", kv_memory="64MiB", **limits)

    plan = DivergencePlan(model=str(model), kvs=tuple(options), tasks=parse_tasks(questions, samples=samples))
    print("| states, KV | task | KL, nats a token | 95 % | another token first | exact |\n|---|---|---|---|---|---|")
    for row in measure_divergence(plan, engine):
        cells = [row.kv, f"{row.task} {row.size}", row.detail or "-", "", "", f"{row.exact} of {row.texts}"]
        if row.kl is not None and row.kl_low is not None and row.kl_high is not None and row.changed is not None:
            cells[2:5] = f"{row.kl:.2g}", f"{row.kl_low:.2g} to {row.kl_high:.2g}", f"{100 * row.changed:.1f} %"
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the simulation")
    parser.add_argument("--model", type=Path, help="folder of a hybrid, whose divergence is measured instead")
    parser.add_argument("--tasks", default="lookup:3,addition:2", help="with a model: demo tasks and their sizes")
    parser.add_argument("--samples", type=int, default=8, help="with a model: questions of a task")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.model is not None:
        measure(args.model, args.tasks, args.samples)
        return
    for drift in (False, True):
        torch.manual_seed(0)
        print(f"\nvalues {'around a mean' if drift else 'without a mean'}, {args.tokens:,} tokens\n", flush=True)
        show(simulate(list(FORMATS), args.tokens, drift))


if __name__ == "__main__":
    main()
