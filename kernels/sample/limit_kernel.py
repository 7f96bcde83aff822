"""top_k and top_p as floors on the score, by selection over the bits of scores: device code, one program a row.

Scores are at most 0, so the bits of their absolute values, read as integers, order them: the best token has the
smallest key. A floor is the smallest key such that the tokens up to it weigh (top_p) or count (top_k) enough.
The k-th best tile peak bounds the k-th best token, so usually a handful of tiles holds all tokens of interest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draw_kernel import SETTINGS, VARYING, is_drawn, load_peak, load_scale, load_scores, weigh


@triton.jit(do_not_specialize=VARYING)
def limit_kernel(
    logits_ptr, peaks_ptr, tile_peaks_ptr, rows_ptr, floors_ptr, sums_ptr, tiles_ptr, keys_ptr,
    stride, V, NUM_TILES, SHARES,
    BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILE_S: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The floor of each drawn row, and the sums of its tiles above it.

    Shapes:  logits [M, V];  peaks [M, SHARES], tile_peaks [M, NUM_TILES], floors [M] fp32;  rows [M, 5] int64;
             sums [M, NUM_TILES] int64;  scratch: tiles [M, NUM_TILES] int32, keys [M, KEYS] int32
    Grid:    (M,)
    """
    i_m = tl.program_id(0)
    peak = load_peak(peaks_ptr, i_m, SHARES, TILE_S)
    scale, floor = load_scale(rows_ptr, i_m)
    top_p = tl.load(rows_ptr + i_m * SETTINGS + 2).to(tl.float64, bitcast=True)
    top_k = tl.load(rows_ptr + i_m * SETTINGS + 3)
    has_k = (top_k > 0) & (top_k < V)
    if is_drawn(peak, scale) & (has_k | (top_p < 1)):
        p_row = logits_ptr + i_m.to(tl.int64) * stride
        p_sums = sums_ptr + i_m.to(tl.int64) * NUM_TILES
        p_tiles = tiles_ptr + i_m.to(tl.int64) * NUM_TILES
        p_keys = keys_ptr + i_m * KEYS
        o_tile = tl.arange(0, TILES)
        m_tile = o_tile < NUM_TILES
        # Tiles that hold a token of the floor or above.
        b_peak = tl.load(tile_peaks_ptr + i_m.to(tl.int64) * NUM_TILES + o_tile, mask=m_tile, other=float("-inf"))
        b_score = (b_peak - peak) * scale
        b_key = _key(b_score)
        total = tl.sum(tl.load(p_sums + o_tile, mask=m_tile, other=0), 0)
        goal = tl.where(has_k, top_k, _share(top_p, total))
        b_mass = tl.where(m_tile & (b_score >= floor), tl.where(has_k, 1, weigh(b_score)), 0)
        limit = tl.minimum(_reach(b_key, b_mass, goal, 16), _key(floor))
        m_live = m_tile & (b_key <= limit)
        num_tiles = tl.sum(m_live.to(tl.int32), 0)
        tl.store(p_tiles + tl.cumsum(m_live.to(tl.int32), 0) - 1, o_tile, mask=m_live)
        tl.store(p_sums + o_tile, tl.zeros((TILES,), tl.int64), mask=m_tile & (b_key > limit))
        tl.debug_barrier()
        if has_k:
            limit = _find(
                p_row, p_tiles, p_keys, num_tiles, V, NUM_TILES, peak, scale, limit, top_k,
                (num_tiles * TILE).to(tl.int64), False, BLOCK_TILES, TILE, KEYS,
            )  # fmt: skip
        if top_p < 1:
            if has_k:
                total = _store_sums(
                    p_row, p_sums, p_tiles, num_tiles, V, NUM_TILES, peak, scale, limit, BLOCK_TILES, TILE
                )
            limit = _find(
                p_row, p_tiles, p_keys, num_tiles, V, NUM_TILES, peak, scale, limit, _share(top_p, total),
                total, True, BLOCK_TILES, TILE, KEYS,
            )  # fmt: skip
        _store_sums(p_row, p_sums, p_tiles, num_tiles, V, NUM_TILES, peak, scale, limit, BLOCK_TILES, TILE)
        floor = -limit.to(tl.float32, bitcast=True)
    tl.store(floors_ptr + i_m, floor)


@triton.jit
def _find(
    p_row, p_tiles, p_keys, num_tiles, V, NUM_TILES, peak, scale, last, goal, whole,
    WEIGHTS: tl.constexpr, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The smallest key up to which the live tiles' tokens reach ``goal``; ``last`` if no key before it does.

    An interval of keys around the answer is divided until its tokens fit into KEYS: first at an estimate from a sample
    of the tiles, then by eight. ``whole``: about the sum over all tokens, in the unit of the goal.
    """
    first = tl.full((), -1, tl.int32)  # the answer is above first and at most last
    left = goal
    count = tl.cdiv(num_tiles, BLOCK_TILES) * BLOCK_TILES * TILE
    low, high = last, last
    if count > KEYS:
        low, high = _estimate(
            p_row, p_tiles, num_tiles, V, NUM_TILES, peak, scale, last, goal, whole, WEIGHTS, BLOCK_TILES, TILE
        )
    o_p = tl.arange(0, 8)
    while (count > KEYS) & (last - first > 1):
        b_pivot = low + ((high - low).to(tl.int64) * o_p // 6).to(tl.int32)
        b_pivot = tl.where(o_p == 7, last, tl.minimum(b_pivot, last))
        b_count = tl.zeros((8,), tl.int32)
        b_mass = tl.zeros((8,), tl.int64)
        for i in range(0, num_tiles, BLOCK_TILES):
            b_score = _load_live(p_row, p_tiles, i, num_tiles, V, NUM_TILES, peak, scale, BLOCK_TILES, TILE)
            b_score = tl.reshape(b_score, (BLOCK_TILES * TILE,))
            b_key = _key(b_score)
            m_up_to = (b_key > first)[:, None] & (b_key[:, None] <= b_pivot[None, :])
            b_count += tl.sum(m_up_to.to(tl.int32), 0)
            if WEIGHTS:
                b_mass += tl.sum(tl.where(m_up_to, weigh(b_score)[:, None], 0), 0)
        if not WEIGHTS:
            b_mass = b_count.to(tl.int64)
        i_p = tl.min(tl.where(b_mass >= left, o_p, 7), 0)  # the first pivot that reaches the goal
        m_before = o_p == i_p - 1
        left -= tl.sum(tl.where(m_before, b_mass, 0), 0)
        count = tl.sum(tl.where(o_p == i_p, b_count, 0), 0) - tl.sum(tl.where(m_before, b_count, 0), 0)
        first = tl.maximum(first, tl.max(tl.where(m_before, b_pivot, -1), 0))
        last = tl.sum(tl.where(o_p == i_p, b_pivot, 0), 0)
        low, high = first + (last - first) // 8, last - (last - first) // 8 - 1
    if last - first > 1:
        count = tl.zeros((), tl.int32)
        for i in range(0, num_tiles, BLOCK_TILES):
            b_score = _load_live(p_row, p_tiles, i, num_tiles, V, NUM_TILES, peak, scale, BLOCK_TILES, TILE)
            b_key = tl.reshape(_key(b_score), (BLOCK_TILES * TILE,))
            m_in = (b_key > first) & (b_key <= last)
            tl.store(p_keys + count + tl.cumsum(m_in.to(tl.int32), 0) - 1, b_key, mask=m_in)
            count += tl.sum(m_in.to(tl.int32), 0)
        tl.debug_barrier()
        o_key = tl.arange(0, KEYS)
        b_key = tl.load(p_keys + o_key, mask=o_key < count, other=0x7FFFFFFF)
        b_mass = (o_key < count).to(tl.int64)
        if WEIGHTS:
            b_mass = tl.where(o_key < count, weigh(-b_key.to(tl.float32, bitcast=True)), 0)
        last = tl.minimum(last, _reach(b_key, b_mass, left, 0))
        tl.debug_barrier()  # the next search writes over these keys
    return last


@triton.jit
def _estimate(
    p_row, p_tiles, num_tiles, V, NUM_TILES, peak, scale, last, goal, whole,
    WEIGHTS: tl.constexpr, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys between which the goal is probably reached, by evenly spaced live tiles; ``whole``: the mass of all."""
    o_live = tl.arange(0, BLOCK_TILES) * num_tiles // BLOCK_TILES
    o_v = tl.load(p_tiles + o_live)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    b_score = tl.reshape(load_scores(p_row, o_v, V, peak, scale), (BLOCK_TILES * TILE,))
    b_key = _key(b_score)
    b_mass = tl.where(b_key <= last, weigh(b_score) if WEIGHTS else 1, 0).to(tl.int64)
    sample = tl.sum(b_mass, 0).to(tl.float64)
    share = tl.minimum(goal.to(tl.float64) / whole.to(tl.float64), 1.0)
    margin = tl.sqrt(share * (1 - share)) / 12  # almost four standard deviations for tokens of equal weight
    low = _reach(b_key, b_mass, ((share - margin) * sample).to(tl.int64), 12)
    high = _reach(b_key, b_mass, ((share + margin) * sample).to(tl.int64), 12)
    return low, tl.minimum(high, last)


@triton.jit
def _reach(b_key, b_mass, goal, REST: tl.constexpr):
    """The smallest key up to which the masses reach ``goal``, bit by bit, but with its last REST bits all set.

    All bits are set if none reaches it.
    """
    found = tl.zeros((), tl.int32)
    for i in range(31 - REST):
        bit = tl.full((), 1, tl.int32) << (30 - i)
        mass = tl.sum(tl.where(b_key < found + bit, b_mass, 0), 0)
        found += tl.where(mass >= goal, 0, bit)
    return found + ((1 << REST) - 1)


@triton.jit
def _store_sums(
    p_row, p_sums, p_tiles, num_tiles, V, NUM_TILES, peak, scale, limit, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr
):
    """Sums of the weights of the live tiles up to ``limit``; returns their total."""
    total = tl.zeros((), tl.int64)
    for i in range(0, num_tiles, BLOCK_TILES):
        b_score = _load_live(p_row, p_tiles, i, num_tiles, V, NUM_TILES, peak, scale, BLOCK_TILES, TILE)
        b_sum = tl.sum(tl.where(_key(b_score) <= limit, weigh(b_score), 0), 1)
        o_live = i + tl.arange(0, BLOCK_TILES)
        o_tile = tl.load(p_tiles + o_live, mask=o_live < num_tiles, other=0)
        tl.store(p_sums + o_tile, b_sum, mask=o_live < num_tiles)
        total += tl.sum(b_sum, 0)
    return total


@triton.jit
def _load_live(
    p_row, p_tiles, i_first, num_tiles, V, NUM_TILES, peak, scale, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr
):
    """Scores [BLOCK_TILES, TILE] of the live tiles from ``i_first`` on; -inf beyond the last."""
    o_live = i_first + tl.arange(0, BLOCK_TILES)
    o_tile = tl.load(p_tiles + o_live, mask=o_live < num_tiles, other=NUM_TILES)
    return load_scores(p_row, o_tile[:, None] * TILE + tl.arange(0, TILE)[None, :], V, peak, scale)


@triton.jit
def _key(b_score):
    return tl.abs(b_score).to(tl.int32, bitcast=True)


@triton.jit
def _share(top_p, total):
    """The smallest whole number that is at least top_p x total."""
    share = top_p * total.to(tl.float64)
    whole = share.to(tl.int64)
    return whole + (whole.to(tl.float64) < share).to(tl.int64)
