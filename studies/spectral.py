"""Spectral KV on the demo model: ``python -m studies.spectral kl --calibrate addition,sorting --tasks ledger:40``.

Bases, layouts and quantizers are the engine's, attention is plain torch (``studies/papers``). Bits are those of blocks
with all metadata. ``kl``: prompts are attended in full precision, then their old blocks are replaced by what a codec
makes of them, and replies are teacher-forced. ``answers``: replies are decoded freely, right ones counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from qkv_engine.bench.texts import task_texts
from qkv_engine.config import BLOCK_TOKENS, EngineConfig
from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.loading import load
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.planner.allocate import allocate
from qkv_engine.planner.basis import solve_basis
from qkv_engine.planner.gradients import Text, profile_texts
from qkv_engine.planner.mixed import RECENT, SINK
from qkv_engine.planner.moments import LayerSums, SideMoments, value_metric
from qkv_engine.planner.sensitivity import Candidates, pages, round_trip
from qkv_engine.planner.spectral import choices, run_energies
from qkv_engine.presets import DEFAULT_KV, resolve_kv
from qkv_engine.text.tokenizer import Tokenizer

from .papers.cache import attention
from .papers.decode import SimulatedBatch

CALIBRATION = {"ledger": 40, "lookup": 100, "addition": 10, "sorting": 40}
EXAM_SEED, REPLIED = 77_001, 0.6  # of a text before the tokens that are compared, at least
VARIANTS = ("", "gradient-metric", "equal", "heads")  # spectral codecs: the planner's, and what it was compared with


class Codec(NamedTuple):
    """What a codec makes of old blocks: x -> P^-1 (quantized P x), by layer and side; ``bits`` with all metadata."""

    name: str
    bits: float
    sides: list[list[list[tuple[str, Tensor, Tensor]]]]  # layer, side, parts of the heads: format, P, P^-1

    def __call__(self, layer: int, side: int, x: Tensor) -> Tensor:
        """Shapes:  x [H, n, D], whole blocks"""
        parts, found, first = self.sides[layer][side], list[Tensor](), 0
        for name, matrix, inverse in parts:
            heads = x[first : first + len(matrix)]
            shape = PageShape(len(heads), BLOCK_TOKENS, x.shape[-1])
            layout = make_format(name, torch.float32).layout(shape, "kv"[side])
            blocks = pages((heads @ matrix.mT).transpose(0, 1).contiguous())
            found.append(round_trip(blocks, layout).transpose(0, 1).flatten(1, 2) @ inverse.mT)
            first += len(heads)
        return torch.cat(found)


def plain(name: str, k: str, v: str, model: LlamaForCausalLM) -> Codec:
    """Formats of the channels that the model has."""
    spec, one = model.config.attention[0], torch.eye(model.config.head_dim).expand(model.config.num_kv_heads, -1, -1)
    shape = PageShape(spec.num_kv_heads, BLOCK_TOKENS, spec.head_dim)
    nbytes = [make_format(n, torch.float32).layout(shape, s).nbytes for n, s in ((k, "k"), (v, "v"))]
    elements = 2 * spec.num_kv_heads * BLOCK_TOKENS * spec.head_dim
    return Codec(name, 8 * sum(nbytes) / elements, [[[(k, one, one)], [(v, one, one)]]] * model.config.num_layers)


def spectral(
    moments: Sequence[tuple[SideMoments, SideMoments]], bits: float, shrink: float, variant: str, name: str
) -> Codec:
    """A codec of the planner's, or of a variant, of at most ``bits``."""
    split = variant == "heads"
    solved = []
    for layer in moments:
        for side in layer:
            parts = [SideMoments(*(x[h : h + 1] for x in vars(side).values())) for h in range(len(side.metric))]
            solved += [(m, _basis(m, shrink, variant)) for m in (parts if split else [side])]
    items = [choices(LayerOf(m), _energies(basis, m, variant)) for m, basis in solved]
    elements = sum(len(m.metric) * m.metric.shape[-1] * BLOCK_TOKENS for m, _ in solved)
    picked = allocate(items, int(bits * elements / 8))
    assert picked is not None, "a floor of few bits fits"
    parts = [
        (choice.name, basis.matrix.float(), basis.matrix.inverse().float())
        for choice, (_, basis) in zip(picked, solved, strict=True)
    ]
    number = len(parts) // (2 * len(moments))
    grouped = [parts[first : first + number] for first in range(0, len(parts), number)]
    sides = [grouped[first : first + 2] for first in range(0, len(grouped), 2)]
    return Codec(name, 8 * sum(choice.nbytes for choice in picked) / elements, sides)


def LayerOf(moments: SideMoments):
    from qkv_engine.layer_kv import LayerKV

    return LayerKV(len(moments.metric), moments.metric.shape[-1])


def _basis(moments, shrink, variant):
    metric = moments.gradient if variant == "gradient-metric" else moments.metric
    return solve_basis(metric, moments.covariance, shrink)


def _energies(basis, moments, variant):
    from qkv_engine.planner.spectral import UNIT

    if variant == "equal":
        return [
            float(x)
            for x in (basis.spectrum / basis.spectrum.sum(-1, keepdim=True)).sum(0).unflatten(0, (-1, UNIT)).sum(-1)
        ]
    if variant.startswith("power"):
        p = float(variant[5:])
        w = ((moments.gradient * moments.covariance).sum((-2, -1)) / basis.spectrum.sum(-1)) ** p
        whole = (basis.spectrum * w[:, None]).sum(0)
        return [float(x) for x in whole.unflatten(0, (-1, UNIT)).sum(-1)]
    if variant.startswith("mix"):
        p = float(variant[3:])
        share = basis.spectrum / basis.spectrum.sum(-1, keepdim=True)
        w = ((moments.gradient * moments.covariance).sum((-2, -1))) ** p
        return [float(x) for x in (share * w[:, None]).sum(0).unflatten(0, (-1, UNIT)).sum(-1)]
    if variant == "exact":
        inv = basis.matrix.inverse()
        e = (inv.mT @ moments.gradient @ inv).diagonal(dim1=-2, dim2=-1) * basis.spectrum
        return [float(x) for x in e.sum(0).unflatten(0, (-1, UNIT)).sum(-1)]
    return run_energies(basis, moments)


def calibrated(tasks: str, samples: int, tokenizer: Tokenizer) -> list[tuple[SideMoments, SideMoments]]:
    """The moments of each layer of the demo model on texts of ``tasks``."""
    config = EngineConfig(kv=resolve_kv(DEFAULT_KV), dtype="float32")
    model = cast(LlamaForCausalLM, load(config, torch.device("cpu"), pack=False)[0].model)
    named = ",".join(f"{task}:{CALIBRATION[task]}" for task in tasks.split(","))
    texts = task_texts(tokenizer, named, samples=samples, max_tokens=1024).texts
    sums = [LayerSums(spec.scale) for spec in model.config.attention]
    for _ in profile_texts(model, texts, [Candidates({}, {})] * model.config.num_layers, moments=sums):
        pass
    outputs = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    spec = model.config.attention[0]
    return [s.found(value_metric(w, spec.num_kv_heads, spec.head_dim)) for s, w in zip(sums, outputs, strict=True)]


class Prompt:
    """Keys and values of a text's first tokens in one layer, attended in full precision."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes:  q [HQ, n, D], k and v [H, n, D];  returns [HQ, n, D]"""
        self.k, self.v = k, v
        return attention(q, k, v)


class Continued(NamedTuple):
    """A layer in which new tokens attend to old ones, of which whole blocks behind the sink went through a codec."""

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, layer: int, prompt: Prompt, codec: Codec | None) -> Continued:
        number = max(0, prompt.k.shape[1] - SINK - RECENT) // BLOCK_TOKENS * BLOCK_TOKENS
        old, sides = slice(SINK, SINK + number), [prompt.k.clone(), prompt.v.clone()]
        for side, x in enumerate(sides):
            if codec is not None and number:
                x[:, old] = codec(layer, side, x[:, old])
        return cls(*sides)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Prompt.attend``."""
        return attention(q, torch.cat((self.k, k), 1), torch.cat((self.v, v), 1))


class Asked:
    """A text with its reply: its prompt in the model, and what the model says of the last tokens in full precision."""

    def __init__(self, model: LlamaForCausalLM, text: Text):
        ids, self.model = torch.tensor(text.token_ids), model
        self.cut = max(text.first_label, int(REPLIED * len(ids)))
        self.rest, self.positions = ids[self.cut : -1], torch.arange(self.cut, len(ids) - 1)
        self.prompt = [Prompt() for _ in range(model.config.num_layers)]
        model(ids[: self.cut], torch.arange(self.cut), SimulatedBatch(self.prompt, model.config.num_kv_heads))
        self.exact = self.logprobs(None)

    def logprobs(self, codec: Codec | None) -> Tensor:
        """[tokens, vocabulary] float32"""
        layers = [Continued.of(number, prompt, codec) for number, prompt in enumerate(self.prompt)]
        hidden = self.model(self.rest, self.positions, SimulatedBatch(layers, self.model.config.num_kv_heads))
        return torch.log_softmax(self.model.compute_logits(hidden).float(), -1)

    def divergence(self, codec: Codec) -> tuple[Tensor, int]:
        """The divergence of each token's prediction from that of full precision, and how many most likely ones differ."""
        found = self.logprobs(codec)
        kl = (self.exact.exp() * (self.exact - found)).sum(-1)
        return kl, int((self.exact.argmax(-1) != found.argmax(-1)).sum())
