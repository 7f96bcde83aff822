"""The schemes of the spectral study's table: papers with presets, other papers, and codecs of the engine's formats.

All are floors: every block is at the fewest bits it ever gets. With ``same`` windows each has the first 32 tokens and
the newest 128 to 255 at 16 bits and gives up whole blocks; with its ``own`` it does as its paper says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.bench.sizing import make_ladder
from qkv_engine.config import BLOCK_TOKENS, KVConfig
from qkv_engine.device.layouts import SIDES
from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.loading import demo_folder
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.loader import read_config
from qkv_engine.planner.mixed import RECENT, SINK
from qkv_engine.planner.sensitivity import pages, round_trip
from qkv_engine.presets import PRESETS, resolve_kv

from .papers import hadamard, kitty, kivi, kvarn, kvmix, oscar, patternkv, pm_kvq, quantizers, xquant
from .papers.cache import LayerCache, Side, by_channel, by_token, full_precision
from .papers.decode import seen

SEEDS, BESIDE, ENGINE, SPECTRAL = "seeds", "beside", "engine", "spectral"  # kinds of schemes
PM_KVQ_TOKENS = 1024  # of PM-KVQ's budget a layer where windows are its own


class Codec(Protocol):
    """What a codec makes of whole old blocks ``[H, n, D]`` of a layer's keys (side 0) or values (side 1)."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> float:
        """Of an element, mean of all layers and both sides, with all metadata."""

    def __call__(self, layer: int, side: int, x: Tensor) -> Tensor: ...


class FieldScheme(NamedTuple):
    """A scheme: its name, its kind, bits of an element with all metadata, and the empty caches of a sequence."""

    name: str
    kind: str
    bits: float
    layers: Callable[[], list[LayerCache]]


class Blocks(NamedTuple):
    """A codec of a ladder's floor, block by block, by the engine's own quantizers: format names by side and layer."""

    name: str
    bits: float
    formats: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, name: str, kv: KVConfig, config: ModelConfig) -> Blocks:
        formats = tuple(tuple(kv.rungs[-1].formats(side, config.num_layers)) for side in SIDES)
        return cls(name, floor_bits(kv, config), formats)

    def __call__(self, layer: int, side: int, x: Tensor) -> Tensor:
        """See ``Codec``."""
        shape = PageShape(x.shape[0], BLOCK_TOKENS, x.shape[2])
        layout = make_format(self.formats[side][layer], torch.float32).layout(shape, SIDES[side])
        return round_trip(pages(x.transpose(0, 1)), layout).transpose(0, 1).flatten(1, 2)


def floor_bits(kv: KVConfig, config: ModelConfig) -> float:
    """Bits of an element of a block at the floor of ``kv``, with all metadata."""
    return make_ladder(replace(kv, eager=True), config, torch.float32).narrowest.effective_bits


def old_blocks(full: int) -> int:
    """The rule of the same windows: whole blocks behind the newest 128 tokens."""
    return max(0, full - RECENT) // BLOCK_TOKENS * BLOCK_TOKENS


def same_windows(layer: LayerCache) -> LayerCache:
    """``layer`` with the windows of all, in place of its own."""
    for side in (layer.k, layer.v):
        side.rule, side.sink = old_blocks, SINK
    return LayerCache(layer.k, layer.v)


def of_codec(codec: Codec, kind: str, num_layers: int) -> FieldScheme:
    """The scheme of a codec, which has the same windows always."""

    def layers() -> list[LayerCache]:
        sides = [
            [Side(old_blocks, partial(codec, number, side), SINK) for side in (0, 1)] for number in range(num_layers)
        ]
        return [LayerCache(k, v) for k, v in sides]

    return FieldScheme(codec.name, kind, codec.bits, layers)


class Field:
    """The schemes for one model.

    ``words`` are texts that OSCAR's rotations and KVmix's layers are found on, ``texts`` their token ids. ``own``: each
    scheme has its own windows. ``codecs``: spectral ones by name.
    """

    def __init__(self, model: LlamaForCausalLM, texts: Sequence[Sequence[int]], words: Sequence[str], *, own: bool):
        self.model, self.texts, self.words, self.own = model, texts, words, own
        self.codecs: dict[str, Codec] = {}
        self.config = read_config(demo_folder())
        self._rotations: dict[bool, list[tuple[Tensor, Tensor]]] = {}
        self._high: kvmix.HighLayers | None = None

    def scheme(self, name: str) -> FieldScheme:
        """The scheme called ``name``: of ``codecs``, of ``NAMES``, or a preset or plan, whose floor is taken."""
        if name in self.codecs:
            return of_codec(self.codecs[name], SPECTRAL, self.num_layers)
        if name not in NAMES:
            return of_codec(Blocks.of(name, resolve_kv(name), self.config), ENGINE, self.num_layers)
        found: FieldScheme = getattr(self, "_" + name.replace("-", "_"))()
        return found

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    @property
    def head_dim(self) -> int:
        return self.model.config.head_dim

    def _made(self, name: str, kind: str, bits: float, layer: Callable[[int], LayerCache]) -> FieldScheme:
        windows = (lambda one: one) if self.own else same_windows
        return FieldScheme(name, kind, bits, lambda: [windows(layer(number)) for number in range(self.num_layers)])

    def _paper(self, name: str, preset: KVConfig, layer: Callable[[int], LayerCache]) -> FieldScheme:
        return self._made(name, SEEDS, floor_bits(preset, self.config), layer)

    def _fp16(self) -> FieldScheme:
        return FieldScheme(
            "fp16", SEEDS, 16, lambda: [LayerCache(full_precision(), full_precision()) for _ in range(self.num_layers)]
        )

    def _kivi_2(self) -> FieldScheme:
        return self._paper("kivi-2", PRESETS["kivi-2"], lambda _: kivi.layer(2, 2, BLOCK_TOKENS))

    def _kivi_2_g32(self) -> FieldScheme:
        scheme = kivi.scheme(2, 2)
        assert scheme.preset is not None
        return self._paper("kivi-2-g32", scheme.preset, scheme.layer)

    def _kitty(self) -> FieldScheme:
        return self._paper("kitty", PRESETS["kitty"], lambda _: kitty.layer(16))

    def _kitty_pro(self) -> FieldScheme:
        return self._paper("kitty-pro", PRESETS["kitty-pro"], lambda _: kitty.layer(32))

    def _xquant(self) -> FieldScheme:
        """Codes are shared by layers of one sequence, so every sequence has quantizers of its own."""
        preset, count = PRESETS["xquant-g32"], self.num_layers
        windows = (lambda one: one) if self.own else same_windows

        def layers() -> list[LayerCache]:
            scheme = xquant.scheme(xquant.largest(count), preset)
            return [windows(scheme.layer(number)) for number in range(count)]

        return FieldScheme("xquant", SEEDS, floor_bits(preset, self.config), layers)

    def _patternkv(self) -> FieldScheme:
        return self._paper("patternkv", PRESETS["patternkv"], lambda _: patternkv.layer(self.head_dim))

    def _kvmix(self) -> FieldScheme:
        """3 bits are plain in groups of 32 where the windows are the same; its words of 11 do not fill a block."""
        if self._high is None:
            self._high = kvmix.top_layers(*kvmix.gradient_scores(demo_folder(), self.words))
        scheme, bits = kvmix.scheme(self._high, self.num_layers), kvmix.layer_bits(self._high, self.num_layers)
        assert scheme.preset is not None

        def layer(number: int) -> LayerCache:
            k, v = (lambda x, b=b: quantizers.kvmix(x, b).values() for b in bits[number])
            never = full_precision().rule
            return LayerCache(Side(never, by_channel(k, kvmix.GROUP)), Side(never, by_token(v, kvmix.GROUP)))

        return self._paper("kvmix", scheme.preset, scheme.layer if self.own else layer)

    def _pm_kvq_2(self) -> FieldScheme:
        """Codes are halved to 2 bits as they enter where the windows are the same, else as the budget fills up."""
        scheme = pm_kvq.scheme(2, self.num_layers, max_len=PM_KVQ_TOKENS)
        assert scheme.preset is not None

        def layer(number: int) -> LayerCache:
            k, v = (pm_kvq.ShrinkingSide(pm_kvq.EQUIVALENT) for _ in range(2))
            k.bits = v.bits = 2
            return LayerCache(k, v)

        return self._paper("pm-kvq-2", scheme.preset, scheme.layer if self.own else layer)

    def _kvarn(self, name: str, k_bits: int, variant: kvarn.Variant = kvarn.RELEASED) -> FieldScheme:
        bits = kvarn.element_bits(k_bits, 2, self.head_dim)
        return self._made(name, BESIDE, bits, lambda _: kvarn.layer(k_bits, 2, variant))

    def _kvarn_k4v2(self) -> FieldScheme:
        return self._kvarn("kvarn-k4v2", 4)

    def _kvarn_k2v2(self) -> FieldScheme:
        return self._kvarn("kvarn-k2v2", 2)

    def _kvarn_k2v2_clipped(self) -> FieldScheme:
        return self._kvarn("kvarn-k2v2-clipped", 2, kvarn.CLIPPED)

    def _kvarn_k2v2_unbounded(self) -> FieldScheme:
        return self._kvarn("kvarn-k2v2-unbounded", 2, kvarn.UNBOUNDED)

    def _oscar(self, name: str, *, by_head: bool) -> FieldScheme:
        rotations = self._fitted(by_head)
        bits = oscar.element_bits(oscar.BITS, self.head_dim)
        return self._made(name, BESIDE, bits, lambda number: oscar.layer(*rotations[number]))

    def _oscar_2(self) -> FieldScheme:
        return self._oscar("oscar-2", by_head=False)

    def _oscar_2_heads(self) -> FieldScheme:
        return self._oscar("oscar-2-heads", by_head=True)

    def _hadamard_2(self) -> FieldScheme:
        return self._made("hadamard-2", BESIDE, hadamard.element_bits(2, self.head_dim), lambda _: hadamard.layer(2))

    @torch.inference_mode()
    def _fitted(self, by_head: bool) -> list[tuple[Tensor, Tensor]]:
        """The rotations of K and V of each layer, of all texts together."""
        if by_head not in self._rotations:
            found = [seen(self.model, ids)[0] for ids in self.texts]
            self._rotations[by_head] = []
            for parts in zip(*found, strict=True):
                q, k, v = (torch.cat([getattr(part, name) for part in parts], 1) for name in "qkv")
                asked = oscar.key_moment(q, len(k))
                of_k, of_v = (oscar.rotation(m, by_head=by_head) for m in (asked, oscar.value_moment(asked, k, v)))
                self._rotations[by_head].append((of_k, of_v))
        return self._rotations[by_head]


NAMES = (
    *("fp16", "kivi-2", "kivi-2-g32", "kitty", "kitty-pro", "xquant", "patternkv", "kvmix", "pm-kvq-2"),
    *("kvarn-k4v2", "kvarn-k2v2", "kvarn-k2v2-clipped", "kvarn-k2v2-unbounded"),
    *("oscar-2", "oscar-2-heads", "hadamard-2"),
)
