"""Cases of the mixture of experts for Triton's interpreter: errors against the reference, or values that differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qkv_engine.kernels.moe import Experts, Routing, SoftmaxOver, SwiGLU, reference
from qkv_engine.kernels.moe.triton import (
    ExpertSums,
    ExpertTiles,
    Sum,
    Tile,
    Tuning,
    experts_mlp_triton,
    most_tiles,
    route_triton,
    sort_by_expert,
)

from .common import relative_error
from .fused_cases import DTYPES, fenced
from .interpreted import report

PLAIN, GPT_OSS = SwiGLU(), SwiGLU(alpha=1.702, limit=7.0, shift=1.0)
TUNINGS: dict[str, Tuning] = {
    "sums": ExpertSums(Sum(columns=256, rows=4, loads=16), Sum(columns=256, rows=2, loads=4)),
    "small tiles": ExpertTiles(8, Tile(16, 32, 2, 3), Tile(32, 64, 2, 3)),
    "large tiles": ExpertTiles(32, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),
}

# Rows (0: some), experts of a row, experts, size, inner size.
SHAPES = ((1, 1, 5, 40, 24), (3, 2, 8, 80, 37), (0, 3, 5, 33, 9))


def make_experts(
    num: int, size: int, inner: int, dtype: torch.dtype, *, bias: bool = False, activation: SwiGLU = PLAIN
) -> Experts:
    """Weights for outputs of about the size of the inputs, and a NaN before and behind."""
    gate_up, down = (fenced(num, *shape, dtype=dtype)[0] for shape in ((2 * inner, size), (size, inner)))
    gate_up.mul_(2 * size**-0.5)
    down.mul_(inner**-0.5)
    biases = [fenced(num, n, dtype=dtype)[0] if bias else None for n in (2 * inner, size)]
    return Experts(gate_up, down, *biases, activation)


def make_routing(num_rows: int, num_experts: int, top_k: int, *, favourites: int | None = None) -> Routing:
    """Random experts and weights; with ``favourites`` only experts below it are chosen."""
    experts = torch.stack([torch.randperm(favourites or num_experts)[:top_k] for _ in range(num_rows)]).int()
    return Routing(experts, torch.rand(num_rows, top_k))


def mlp_error(
    num_rows: int,
    experts: Experts,
    top_k: int,
    tuning: Tuning | None,
    *,
    favourites: int | None = None,
) -> float:
    """Relative error; ``x`` is written last: only that may happen right before the launch."""
    routing = make_routing(num_rows, len(experts.down), top_k, favourites=favourites)
    x, _ = fenced(num_rows, experts.down.shape[1], dtype=experts.down.dtype)
    found = experts_mlp_triton(x, routing, experts, tuning=tuning)
    assert found.shape == x.shape and found.dtype == x.dtype
    return relative_error(found, reference.experts_mlp(x, routing, experts))


def untouched_experts(tuning: Tuning, num_rows: int) -> float:
    """Experts that no token chose are all NaN and are not read."""
    experts = make_experts(8, 48, 24, torch.float32, bias=True)
    for part in experts[:4]:
        part[3:] = float("nan")
    return mlp_error(num_rows, experts, 2, tuning, favourites=3)


def alone(tuning: Tuning, num_rows: int) -> float:
    """A row has the same bits whichever rows are beside it, and wherever it is."""
    experts = make_experts(5, 48, 24, torch.bfloat16)
    x, routing, order = torch.randn(num_rows, 48).bfloat16(), make_routing(num_rows, 5, 2), torch.randperm(num_rows)
    together = experts_mlp_triton(x, routing, experts, tuning=tuning)
    mixed = experts_mlp_triton(x[order], Routing(*(part[order] for part in routing)), experts, tuning=tuning)
    few = experts_mlp_triton(x[:3], Routing(*(part[:3].contiguous() for part in routing)), experts, tuning=tuning)
    return float(not (torch.equal(together[order], mixed) and torch.equal(together[:3], few)))


def plan(num_rows: int, num_experts: int, top_k: int, block_m: int, favourites: int | None = None) -> float:
    """Values that differ from a stable sort and its tiles, and from how many tiles there may be."""
    routing = make_routing(num_rows, num_experts, top_k, favourites=favourites)
    found, chosen = sort_by_expert(routing, num_experts, block_m), routing.experts.flatten()
    tiles, first = [], 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=num_experts).tolist()):
        places = range(first, first + count, block_m)
        tiles += [[expert, place, min(place + block_m, first + count), 0] for place in places]
        first += count
    most = most_tiles(num_rows, top_k, num_experts, block_m)
    tiles += [[-1, -1, -1, 0]] * (most - len(tiles))
    wrong = int((found.order.cpu() != chosen.argsort(stable=True).cpu()).sum())
    return float(wrong + (found.tiles.tolist() != tiles))


def routing_error(logits: Tensor, top_k: int, over: SoftmaxOver) -> float:
    """Infinity if experts differ, otherwise the largest difference of the weights; NaNs must be the same."""
    found, expected = route_triton(logits, top_k, over), reference.route(logits, top_k, over)
    if not torch.equal(found.experts, expected.experts) or found.experts.dtype != torch.int32:
        return float("inf")
    if not torch.equal(found.weights.isnan(), expected.weights.isnan()):
        return float("inf")
    return float((found.weights - expected.weights).nan_to_num().abs().max())


def odd_logits(num_rows: int, num_experts: int) -> Tensor:
    """Ties everywhere, both zeros, infinities; the last two rows have NaNs of both signs, one has nothing else."""
    logits = torch.randint(-2, 3, (num_rows, num_experts)).float()
    logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum())) < 0.5, -1.0, 1.0)
    logits[0, 1:] = float("-inf")
    logits[-1] = float("nan")
    logits[-2, ::2] = -float("nan")
    return logits


def product_cases(name: str, tuning: Tuning) -> dict[str, Callable[[], float]]:
    """Odd sizes in every dtype; SwiGLU without biases, gpt-oss's activation with them: in fp32 both at every size."""
    some, many = (4, 5) if isinstance(tuning, ExpertSums) else (17, 33)  # sums take a program a row, which is slow here
    found: dict[str, Callable[[], float]] = {
        f"equal: untouched, {name}": lambda: float(untouched_experts(tuning, some) > 1e-6),
        f"equal: alone, {name}": lambda: alone(tuning, some),
        f"fp32 {name}, all on one": lambda: mlp_error(
            many, make_experts(5, 40, 24, torch.float32), 1, tuning, favourites=1
        ),
    }
    for dtype_name, dtype in DTYPES.items():
        for index, (num_rows, top_k, num, size, inner) in enumerate(SHAPES):
            num_rows = num_rows or some
            for activation in (PLAIN, GPT_OSS) if dtype_name == "fp32" else ((PLAIN, GPT_OSS)[index % 2],):

                def case(
                    num_rows: int = num_rows,
                    top_k: int = top_k,
                    shape: tuple[int, int, int] = (num, size, inner),
                    dtype: torch.dtype = dtype,
                    activation: SwiGLU = activation,
                ) -> float:
                    experts = make_experts(*shape, dtype, bias=activation == GPT_OSS, activation=activation)
                    return mlp_error(num_rows, experts, top_k, tuning)

                key = f"{dtype_name} {name} {num_rows} x {size} x {inner}, {top_k} of {num}, alpha {activation.alpha}"
                found[key] = case
    return found


def cases() -> dict[str, Callable[[], float]]:
    torch.manual_seed(0)
    found: dict[str, Callable[[], float]] = {}
    for over in SoftmaxOver:
        for num_experts, top_k in ((5, 1), (8, 3), (128, 8), (60, 60)):
            for logits in (torch.randn(3, num_experts), odd_logits(5, num_experts).bfloat16()):
                key = f"route {over.name} {top_k} of {num_experts} {logits.dtype}"
                found[key] = lambda x=logits, k=top_k, o=over: routing_error(x, k, o)
    for num_rows, num_experts, top_k, favourites in (
        (1, 5, 1, None), (3, 60, 4, None), (17, 8, 3, None), (33, 5, 1, 1), (33, 16, 4, 5), (300, 8, 2, None),
        (1, 128, 8, None),
    ):  # fmt: skip
        for block_m in (8, 16):
            key = f"equal: plan {num_rows} x {top_k} of {num_experts}, {favourites}, tiles of {block_m}"
            found[key] = lambda a=(num_rows, num_experts, top_k, block_m, favourites): plan(*a)
    for name, tuning in TUNINGS.items():
        found |= product_cases(name, tuning)
    for num_rows in (1, 17, 33):  # launched as the engine does
        found[f"bf16 chosen {num_rows}"] = lambda n=num_rows: mlp_error(
            n, make_experts(8, 272, 80, torch.bfloat16, bias=True), 2, None
        )
    return found


if __name__ == "__main__":
    report(cases())
