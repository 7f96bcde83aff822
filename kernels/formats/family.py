"""Format families: storage of one side (K or V) of a page, and all operations on its bytes.

A side has codes and metadata, which may lie apart. The rest of the engine knows a side by its sizes and asks
``side.family`` for everything else. ``docs/adding_a_format.md`` builds a family step by step.

No torch here: presets are read before torch is, and operations are imported on first use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qkv_engine.config import KVConfig

SideName = Literal["k", "v"]
LIMIT = 32752.0  # of elements: half of fp16's largest value, so that min and range are both finite in fp16; exact there
SIDE_ALIGN = 128  # bytes: a cache line, so that no row of codes straddles two


@dataclass(frozen=True)
class PageShape:
    """Extent of one side of a page: KV heads, tokens, elements a head."""

    num_kv_heads: int
    num_tokens: int
    head_dim: int


class SideBytes(NamedTuple):
    """The bytes of n page sides, or views of them in the arena.

    Shapes:  codes [n, codes_nbytes] uint8;  meta [n, meta_nbytes] uint8;  bank [n, bank_nbytes] uint8, the
             patterns of the request that each side belongs to, ``None`` for sides without a bank
    """

    codes: Tensor
    meta: Tensor
    bank: Tensor | None = None

    def copy_(self, other: SideBytes) -> None:
        """Writes codes and metadata of ``other`` here."""
        self.codes.copy_(other.codes)
        self.meta.copy_(other.meta)


@dataclass(frozen=True)
class Side(ABC):
    """Layout of one side of a page; families subclass it. Hashable; equal sides have bytes of equal meaning."""

    name: SideName
    shape: PageShape

    family: ClassVar[Family]

    @property
    @abstractmethod
    def codes_nbytes(self) -> int:
        """Bytes of the codes of all heads, a multiple of 16; all bytes of a dense side, 0 for a subordinate one."""

    @property
    @abstractmethod
    def meta_nbytes(self) -> int:
        """Bytes of all metadata, padding not counted."""

    @property
    def bank_nbytes(self) -> int:
        """Bytes of a request's patterns for this side, of all heads, a multiple of 128; 0 without patterns."""
        return 0

    @property
    def num_patterns(self) -> int:
        """The number of patterns in a request's bank that are mined from its prompt."""
        return 0

    @property
    def num_later(self) -> int:
        """The number of windows after the prompt that add a pattern each, behind those of the prompt."""
        return 0

    @property
    def pattern_nbytes(self) -> int:
        """Bytes of one of the patterns in a bank, of all heads; patterns follow one another."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim

    def visible_nbytes(self, num_windows: int) -> int:
        """Bytes of the patterns that tokens may choose from in the last of ``num_windows`` windows after the prompt."""
        return self.bank_nbytes

    @property
    @abstractmethod
    def spec(self) -> tuple[Any, ...]:
        """Compile-time record that the family's device functions get: a named tuple of numbers and Triton dtypes."""

    @property
    def dense_dtype(self) -> torch.dtype | None:
        """The dtype of a dense side's elements; ``None`` for codes."""
        return None

    @property
    def dominant(self) -> Side | None:
        """The side one layer below whose codes a subordinate side shares; ``None`` for all other sides.

        A subordinate side has metadata alone: seals and demotions write no codes of it, and attention reads it as a
        page of ``dominant``.
        """
        return None

    @property
    def element_bits(self) -> float:
        """Bits of codes an element, of the side below if this one is subordinate; metadata not counted."""
        shape = self.shape
        return 8 * (self.dominant or self).codes_nbytes / (shape.num_kv_heads * shape.num_tokens * shape.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata one after the other, padded to a cache line."""
        return -(-(self.codes_nbytes + self.meta_nbytes) // SIDE_ALIGN) * SIDE_ALIGN


class Format(Protocol):
    """A choice of a family's parameters by name; ``layout`` raises ``ConfigError`` for a shape it cannot take."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> float:
        """Code bits per element that has a code, metadata not counted."""
        ...

    def layout(self, shape: PageShape, side: SideName) -> Side: ...


class CpuOps(NamedTuple):
    """CPU operations in vectorised torch. ``rows``, ``out``: ``SideBytes`` of n sides; x is [n, H, T, D].

    ``seal(x, out, side)`` writes codes and metadata, returns whether all of x is finite.
    ``demote(rows, out, old, new)`` writes the side ``old`` as ``new``.
    ``dequantize(rows, side, dtype)`` returns x.
    ``scores(q, rows, side)``: q [n, H, G, D] float32 times K, [n, H, G, T].
    ``values(p, rows, side)``: p [n, H, G, T] float32 times V, [n, H, G, D].
    """

    seal: Callable[[Tensor, SideBytes, Any], bool]
    demote: Callable[[SideBytes, SideBytes, Any, Any], None]
    dequantize: Callable[[SideBytes, Any, torch.dtype], Tensor]
    scores: Callable[[Tensor, SideBytes, Any], Tensor]
    values: Callable[[Tensor, SideBytes, Any], Tensor]


class TorchOps(NamedTuple):
    """Operations in torch: the plain references, and those of the CPU, which equal them byte for byte where they write.

    ``quantize(x, side, bank)``, ``dequantize(rows, side)`` (float32), ``demote(rows, old, new)``. ``bank`` is
    ``SideBytes.bank``.
    """

    quantize: Callable[[Tensor, Any, Tensor | None], SideBytes]
    dequantize: Callable[[SideBytes, Any], Tensor]
    demote: Callable[[SideBytes, Any, Any], SideBytes]
    cpu: CpuOps


class KeyFunctions(NamedTuple):
    """Device functions of K in the integer decode kernel, and the fewest token tiles of a page.

    ``query(p_q, p_bank, i_h, b_heads, scale, SIDE, D, BLOCK_G)``: the heads' queries at ``p_q`` [BLOCK_G], prepared, as
    a tuple.
    ``scores(query, p_codes, p_meta, i_h, SIDE, TILES, T, D, BLOCK_G)``: a page's scores.
    """

    query: Any
    scores: Any
    min_tiles: int


class ValueFunctions(NamedTuple):
    """Device functions of V in the integer decode kernel, and the fewest token tiles of a page.

    ``begin(SIDE, TILES, T, D, BLOCK_G)``: zeroed accumulators, a tuple.
    ``add(sums, b_p, b_shrink, p_codes, p_meta, i_h, SIDE, TILES, T, D, BLOCK_G)``: the accumulators times
    ``b_shrink`` [BLOCK_G], plus a page weighed by ``b_p``.
    ``finish(sums, b_total, p_o, p_bank, i_h, b_heads, SIDE, D)``: stores the accumulators over ``b_total`` [BLOCK_G] as
    the heads' rows of D float32 at ``p_o`` [BLOCK_G].
    """

    begin: Any
    add: Any
    finish: Any
    min_tiles: int


class TritonOps(NamedTuple):
    """Device functions (``triton.jit``), which equal the references byte for byte where they write.

    ``p_codes`` and ``p_meta`` are uint8 pointers to a side's codes and metadata, ``p_bank`` one to its patterns, which
    points anywhere if the side has no bank.

    ``load_tile(p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE, H, T, D, BLOCK_D, DTYPE)``: tokens
    ``o_t`` [TILE] of a head as [TILE, BLOCK_D] ``DTYPE``, zero where ``b_t`` is false. Dense pages of sinks have fewer
    tokens than T.
    ``seal_head(p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE, H, T, D, TILE_D)``: writes a head's
    elements [T, TILE_D], as stored before (``b_raw``) and finite in float32 (``b_x``), of the last of ``num_windows``
    windows after the prompt.
    ``demote_head(p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD, NEW, H, T, D, TILE_D)``: writes a head of ``OLD`` as
    ``NEW``; called for the family of ``NEW``.
    ``integer(side)``: ``KeyFunctions`` of a K side or ``ValueFunctions`` of a V side, for the integer decode kernel;
    ``None`` for a side that the floating-point kernel serves.
    ``seal_warps``: the fewest warps of a program that seals a head, whose elements they hold in registers.
    """

    load_tile: Any
    seal_head: Any
    demote_head: Any
    integer: Callable[[Any], KeyFunctions | ValueFunctions | None]
    seal_warps: int = 4


class SideFormats(NamedTuple):
    """Names of formats, for K and for V."""

    k: tuple[str, ...] = ()
    v: tuple[str, ...] = ()


NO_FORMATS = SideFormats()


@dataclass(frozen=True, eq=False)
class Family:
    """A kind of side and all operations on its bytes.

    ``formats(dtype)``: the formats by name, for a model that computes in ``dtype``.
    ``check_step(old, new)`` raises ``ValueError`` if ``old``, of any family, cannot be rewritten as ``new``.
    ``torch_ops()`` and ``triton()`` import torch and Triton on first use.
    ``parse(name)``: a format by a name with numbers in it, which ``formats`` need not list; ``None`` for other names.
    ``presets``: ladders that the user knows by name, whose last rung has formats of this family.
    ``candidates``: the formats that the planner may give to a layer.
    """

    name: str
    formats: Callable[[torch.dtype], Mapping[str, Format]]
    check_step: Callable[[Side, Any], None]
    torch_ops: Callable[[], TorchOps]
    triton: Callable[[], TritonOps]
    parse: Callable[[str], Format | None] = lambda name: None
    presets: tuple[KVConfig, ...] = ()
    candidates: SideFormats = NO_FORMATS

    @cached_property
    def _ops(self) -> TorchOps:
        return self.torch_ops()

    @property
    def cpu(self) -> CpuOps:
        """The operations of the CPU."""
        return self._ops.cpu

    def quantize(self, x: Tensor, side: Side, bank: Tensor | None = None) -> SideBytes:
        """The bytes of ``x`` [n, H, T, D] as sides, plainly."""
        return self._ops.quantize(x, side, bank)

    def dequantize(self, rows: SideBytes, side: Side) -> Tensor:
        """Elements [n, H, T, D] float32, plainly."""
        return self._ops.dequantize(rows, side)

    def demote(self, rows: SideBytes, old: Side, new: Side) -> SideBytes:
        """The sides ``old`` as ``new``, which is of this family, plainly."""
        return self._ops.demote(rows, old, new)


def plain_cpu_ops(
    quantize: Callable[[Tensor, Any, Tensor | None], SideBytes],
    dequantize: Callable[[SideBytes, Any], Tensor],
    demote: Callable[[SideBytes, Any, Any], SideBytes],
) -> CpuOps:
    """Operations made of a family's references: correct from the start, fast enough where the CPU matters little."""

    def seal(x: Tensor, out: SideBytes, side: Any) -> bool:
        out.copy_(quantize(x, side, out.bank))
        return bool(x.isfinite().all())

    return CpuOps(
        seal=seal,
        demote=lambda rows, out, old, new: out.copy_(demote(rows, old, new)),
        dequantize=lambda rows, side, dtype: dequantize(rows, side).to(dtype),
        scores=lambda q, rows, side: q @ dequantize(rows, side).mT,
        values=lambda p, rows, side: p @ dequantize(rows, side),
    )
