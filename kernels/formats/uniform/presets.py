"""Ladders of uniform rungs: integers of one width, KIVI's, XQuant's, PM-KVQ's, and 8 and 4 bits under pressure."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

from qkv_engine.config import BLOCK_TOKENS, DENSE16, KVConfig, RungConfig
from qkv_engine.layer_schedule import ALL, LayerCount, LayerSchedule

from ..family import SideFormats


def uniform_rung(bits: int, group: int = 128, v_bits: int | None = None) -> RungConfig:
    """KIVI's choice of axes: K in groups of tokens per channel, V (of ``v_bits``, or as many) per token."""
    v_bits = bits if v_bits is None else v_bits
    name = f"int{bits}" if bits == v_bits else f"k{bits}v{v_bits}"
    suffix = "" if group == BLOCK_TOKENS else f"-g{group}"
    return RungConfig(name + suffix, f"int{bits}-channel-{group}", f"int{v_bits}-token-{group}")


def _kivi() -> Iterator[KVConfig]:
    """KIVI (arXiv 2402.02750) at every width, in groups of a block or of 32, without and with a sink."""
    widths = {"kivi-4": (4, 4), "kivi-2": (2, 2), "kivi-k4v2": (4, 2), "kivi-k2v4": (2, 4)}
    for (name, (k, v)), group, sink in product(widths.items(), (BLOCK_TOKENS, 32), (0, 32)):
        suffix = f"{'' if group == BLOCK_TOKENS else f'-g{group}'}{'-sink' if sink else ''}"
        rungs = (DENSE16, uniform_rung(k, group, v))
        yield KVConfig(name=name + suffix, rungs=rungs, sink=sink, recent=128, eager=True)


# XQuant's numbers of layers: K wide, V wide, V with codes of its own. The paper's tables never share K's codes.
XQUANT: dict[str, tuple[LayerCount, LayerCount, LayerCount]] = {
    "xquant": (-2, 2, Fraction(1, 2)),  # 1.375 code bits
    "xquant-1.28": (ALL, 0, Fraction(1, 8)),
    "xquant-1.16": (Fraction(3, 4), 0, Fraction(1, 8)),
}
# Calibration at 1 and at 2 bits by group: the paper's static pair at 32; measured to answer best at 128.
XQUANT_ETAS = {32: ("1/6", "0.045"), BLOCK_TOKENS: ("0.2", "0.045")}


def xquant_rung(
    name: str, extents: tuple[LayerCount, LayerCount, LayerCount], group: int, etas: tuple[str, str]
) -> RungConfig:
    """XQuant's formats (arXiv 2510.11236): 2 and 1 bits by layer, ``etas`` at 1 and at 2 bits, V's codes in pairs."""
    narrow, wide = (f"-{group}" + (f"-eta{eta}" if Fraction(eta) else "") for eta in etas)
    k_wide, v_wide, v_single = extents
    k = LayerSchedule(f"int2-channel{wide}", f"int1-channel{narrow}", k_wide)
    v = LayerSchedule(f"int2-token{wide}", f"int1-token{narrow}", v_wide, v_single)
    return RungConfig(name, k, v)


def _xquant() -> Iterator[KVConfig]:
    """XQuant at each of its sizes, in groups of a block or of 32, without and with a sink."""
    for (base, extents), group, sink in product(XQUANT.items(), (BLOCK_TOKENS, 32), (0, 32)):
        name = base if group == BLOCK_TOKENS else f"{base}-g{group}"
        rungs = (DENSE16, xquant_rung(name, extents, group, XQUANT_ETAS[group]))
        yield KVConfig(name=f"{name}-sink" if sink else name, rungs=rungs, sink=sink, recent=128, eager=True)


def _pm_kvq(floor: int) -> KVConfig:
    """PM-KVQ (arXiv 2505.18610) without a profile: K and V per token, all layers down to ``floor`` bits."""
    widths = [bits for bits in (8, 4, 2) if bits >= floor]
    rungs = tuple(RungConfig(f"pm-kvq-{bits}", f"int{bits}-token-128", f"int{bits}-token-128") for bits in widths)
    return KVConfig(name=f"pm-kvq-{floor}", rungs=(DENSE16, *rungs), sink=1, recent=128)


PRESETS = (
    KVConfig(name="int8", rungs=(DENSE16, uniform_rung(8)), sink=32, eager=True),
    KVConfig(name="int4", rungs=(DENSE16, uniform_rung(4)), sink=32, eager=True),
    *_kivi(),
    *_xquant(),
    _pm_kvq(4),
    _pm_kvq(2),
    KVConfig(name="auto", rungs=(DENSE16, uniform_rung(8), uniform_rung(4)), sink=32),
)

_PER_TOKEN = tuple(f"int{bits}-token-128" for bits in (8, 4, 2, 1))
# One bit is calibrated: eta 0.2 puts the levels a fifth of the range inside.
CANDIDATES = SideFormats(
    k=(*(f"int{bits}-channel-128" for bits in (8, 4, 3, 2)), "int1-channel-128-eta0.2", *_PER_TOKEN),
    v=(*_PER_TOKEN, "int3-token-128", "int1-token-128-eta0.2"),
)
