"""Finds the fastest of the library's kernels for products of one size, among those that give the same bits.

Only a race shows which kernel is fastest. Since all of them give what ``F.linear`` gives, bit for bit, a race lost by
chance costs time and never changes a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from .cublaslt import Product, cublaslt

logger = logging.getLogger("qkv_engine")

NEARBY = (8, -8, 16, -16, 24, -24)  # rows more or less, whose kernels are tried too: the heuristic names but eight
LEAST_ROWS = 48  # below, all that is proposed reads weights as fast as it can
MAX_WEIGHTS = 12  # read one after the other, so that none is in the cache when its turn comes again
FIRST_RUNS, FINALISTS = 4, 6
ROUNDS = 2  # of the finals, of which the faster counts
WORTH = 0.97  # of the time of ``F.linear``: what gains less is chance
SLEEP_CYCLES = 60_000  # of the device for each launch, so that the host is ahead of it

Run = Callable[[Tensor, Tensor], Tensor]


@torch.inference_mode()
def fastest_product(weights: Sequence[Tensor], num_rows: int) -> Product | None:
    """The kernel for x [``num_rows``, I] @ weight.T with any of ``weights`` [O, I].

    ``None`` if ``F.linear`` is as fast, rows are few, or the library is not to be had. Takes the device 20 to 150 ms.
    Its results equal those of ``F.linear`` in every bit.
    """
    first = weights[0]
    library = cublaslt(first.device, first.dtype)
    if library is None or num_rows < LEAST_ROWS or first.shape[1] % 8:
        return None
    generator = torch.Generator(first.device).manual_seed(0)
    x = torch.randn(num_rows, first.shape[1], generator=generator, dtype=first.dtype, device=first.device)
    nearby = tuple(num_rows + more for more in NEARBY)
    weights = weights[:MAX_WEIGHTS]

    def seconds(run: Run, number: int) -> float:
        return time_runs(run, x, weights, number)

    try:
        expected = [F.linear(x, weight) for weight in weights[:2]]
        products = [
            product
            for product in library.products(first, num_rows, nearby)
            if all(torch.equal(product(x, w), out) for w, out in zip(weights, expected, strict=False))
        ]
        return race(products, F.linear, seconds, len(weights))
    except OSError as error:
        logger.warning("matrix products are torch's: %s", error)
        return None


def race(
    products: Sequence[Product], usual: Run, seconds: Callable[[Run, int], float], num_runs: int
) -> Product | None:
    """The fastest of ``products`` in a short race and a long one of ``num_runs``; ``None`` if ``usual`` nearly is.

    ``seconds(run, n)`` is the time of ``n`` runs.
    """
    heats = sorted((seconds(product, FIRST_RUNS), place) for place, product in enumerate(products))
    finalists = [products[place] for _, place in heats[:FINALISTS]]
    # Everybody runs in every round, so that a clock that rises or falls meanwhile does not decide.
    runners: list[Run] = [usual, *finalists]
    rounds = [[seconds(run, num_runs) for run in runners] for _ in range(ROUNDS)]
    least, *times = map(min, zip(*rounds, strict=True))
    best, product = min(zip(times, finalists, strict=True), key=itemgetter(0), default=(least, None))
    return product if best < WORTH * least else None


def time_runs(run: Run, x: Tensor, weights: Sequence[Tensor], number: int) -> float:
    """Seconds that ``number`` launches take the device, each with the next of ``weights``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES * number)
    start.record()
    for i in range(number):
        run(x, weights[i % len(weights)])
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
