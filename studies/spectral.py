"""Spectral KV on the demo model: ``python -m studies.spectral --calibrate addition,sorting --tasks ledger:40``.

Bases, layouts and quantizers are the engine's, attention is plain torch (``studies/papers``). Bits are those of a block
with all metadata. Divergence: prompts are attended in full precision, then their old blocks are replaced by what a
codec makes of them, and the last tokens of replies are compared with full precision. ``--answers``: questions are
decoded freely, too, and right ones counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import NamedTuple, cast

import torch
from torch import Tensor

from qkv_engine.bench.grading import grade
from qkv_engine.bench.questions import ask, parse_tasks
from qkv_engine.bench.table import Column, Table, from_rows
from qkv_engine.bench.texts import task_texts
from qkv_engine.config import BLOCK_TOKENS, EngineConfig
from qkv_engine.device.layouts import SIDES
from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.kernels.formats.graded.layout import UNIT
from qkv_engine.layer_kv import LayerKV
from qkv_engine.loading import load
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.planner.allocate import Choice, allocate
from qkv_engine.planner.basis import Basis, solve_basis
from qkv_engine.planner.gradients import Text, profile_texts
from qkv_engine.planner.mixed import SINK
from qkv_engine.planner.moments import LayerSums, SideMoments, moments_of
from qkv_engine.planner.sensitivity import Candidates, pages, round_trip
from qkv_engine.planner.spectral import DEFAULT_SHRINK, choices, run_energies
from qkv_engine.presets import DEFAULT_KV, resolve_kv
from qkv_engine.text.tokenizer import Tokenizer

from . import results
from .field_schemes import SPECTRAL, of_codec, old_blocks
from .papers.cache import attention
from .papers.decode import SimulatedBatch, generate
from .papers.demo import demo_model

CALIBRATION = {"ledger": 40, "lookup": 100, "addition": 10, "sorting": 40}
PEERS = {  # K, V
    "int4": ("int4-channel-128", "int4-token-128"),
    "kitty-pro": ("kitty-25", "int2-token-128"),
    "kivi-2": ("int2-channel-128", "int2-token-128"),
}
# The planner's codec, and what it was compared with: the gradients' second moment as metric; all heads weighed alike;
# a layout for each head.
VARIANTS = ("planner", "gradient-metric", "equal", "heads")
SEED, MAX_TOKENS, COMPARED_FROM = 77, 1400, 0.6  # of the texts; the share of a text before the tokens that are compared


@dataclass(frozen=True)
class Codec:
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
            layout = make_format(name, torch.float32).layout(shape, SIDES[side])
            blocks = pages((heads @ matrix.mT).transpose(0, 1).contiguous())
            found.append(round_trip(blocks, layout).transpose(0, 1).flatten(1, 2) @ inverse.mT)
            first += len(heads)
        return torch.cat(found)


def plain(name: str, k: str, v: str, model: LlamaForCausalLM) -> Codec:
    """Formats of the channels that the model has."""
    spec = model.config.attention[0]
    one = torch.eye(spec.head_dim).expand(spec.num_kv_heads, -1, -1)
    shape = PageShape(spec.num_kv_heads, BLOCK_TOKENS, spec.head_dim)
    nbytes = [make_format(n, torch.float32).layout(shape, s).nbytes for n, s in zip((k, v), SIDES, strict=True)]
    elements = 2 * spec.num_kv_heads * BLOCK_TOKENS * spec.head_dim
    return Codec(name, 8 * sum(nbytes) / elements, [[[(k, one, one)], [(v, one, one)]]] * model.config.num_layers)


def spectral(
    moments: Sequence[tuple[SideMoments, SideMoments]], bits: float, shrink: float, variant: str, name: str
) -> Codec:
    """The planner's codec of at most ``bits``, or a variant of it."""
    solved, items, num_elements = list[Basis](), list[list[Choice]](), 0
    for name_of_side, side in zip(cycle(SIDES), chain(*moments)):
        for part in _heads(side) if variant == "heads" else [side]:
            basis = solve_basis(part.gradient if variant == "gradient-metric" else part.metric, part.covariance, shrink)
            layer = LayerKV(*part.metric.shape[:2])
            solved.append(basis)
            items.append(choices(layer, name_of_side, _energies(basis, part, variant)))
            num_elements += layer.num_kv_heads * layer.head_dim * BLOCK_TOKENS
    picked = allocate(items, int(bits * num_elements / 8))
    assert picked is not None, "a floor of few bits fits"
    parts = [
        (choice.name, basis.matrix.float(), basis.matrix.inverse().float())
        for choice, basis in zip(picked, solved, strict=True)
    ]
    number = len(parts) // (2 * len(moments))
    sides = [parts[first : first + number] for first in range(0, len(parts), number)]
    nbytes = sum(choice.nbytes for choice in picked)
    return Codec(name, 8 * nbytes / num_elements, [sides[first : first + 2] for first in range(0, len(sides), 2)])


def _heads(side: SideMoments) -> list[SideMoments]:
    return [SideMoments(*(x[head : head + 1] for x in vars(side).values())) for head in range(len(side.metric))]


def _energies(basis: Basis, moments: SideMoments, variant: str) -> list[float]:
    if variant != "equal":
        return run_energies(basis, moments)
    shares = (basis.spectrum / basis.spectrum.sum(-1, keepdim=True)).sum(0)
    return [float(run) for run in torch.unflatten(shares, 0, (-1, UNIT)).sum(-1)]


@torch.enable_grad()
def calibrated(tasks: str, samples: int, tokenizer: Tokenizer) -> list[tuple[SideMoments, SideMoments]]:
    """The moments of each layer of the demo model on texts of ``tasks``, separated by commas."""
    config = EngineConfig(kv=resolve_kv(DEFAULT_KV), dtype="float32")
    model = cast(LlamaForCausalLM, load(config, torch.device("cpu"), pack=False)[0].model)
    named = ",".join(f"{task}:{CALIBRATION[task]}" for task in tasks.split(","))
    sums = [LayerSums(spec.scale) for spec in model.config.attention]
    texts = task_texts(tokenizer, named, samples=samples, max_tokens=1024).texts
    for _ in profile_texts(model, texts, [Candidates({}, {})] * model.config.num_layers, moments=sums):
        pass
    return moments_of(model, sums)


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
        number = old_blocks(prompt.k.shape[1] - SINK)
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
        self.cut = max(text.first_label, int(COMPARED_FROM * len(ids)))
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
        """Each token's divergence from full precision, and the number of tokens whose most likely one differs."""
        found = self.logprobs(codec)
        kl = (self.exact.exp() * (self.exact - found)).sum(-1)
        return kl, int((self.exact.argmax(-1) != found.argmax(-1)).sum())


@dataclass(frozen=True, kw_only=True)
class SpectralRow:
    """A codec on the texts: divergence a token in nats, share of tokens whose most likely one differs, right answers.

    ``bits`` of an element of a block with all metadata; ``right`` of ``asked`` questions, None if none was asked.
    """

    codec: str
    bits: float
    divergence: float
    differs: float
    right: int | None
    asked: int


def measure(codec: Codec, texts: Sequence[Asked], answers: Sequence[bool] | None) -> SpectralRow:
    """The row of ``codec``."""
    found, differ = zip(*(text.divergence(codec) for text in texts), strict=True)
    kl = torch.cat(found)
    right, asked = (None, 0) if answers is None else (sum(answers), len(answers))
    share = sum(differ) / len(kl)
    return SpectralRow(
        codec=codec.name, bits=codec.bits, divergence=float(kl.mean()), differs=share, right=right, asked=asked
    )


def answer(codec: Codec, tasks: str, samples: int, model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[bool]:
    """Whether each question of ``tasks`` is answered right, decoded freely with blocks as ``codec`` leaves them."""
    found = list[bool]()
    for task in parse_tasks(tasks, samples=samples, seed=SEED, field="tasks"):
        for asked, example in zip(ask(tokenizer, task.examples), task.examples, strict=True):
            layers = of_codec(codec, SPECTRAL, model.config.num_layers).layers()
            assert tokenizer.eos_token_id is not None and asked.params.max_tokens is not None, "of the demo model"
            ids = generate(model, layers, asked.prompt, asked.params.max_tokens, {tokenizer.eos_token_id})
            found.append(grade([tokenizer.decode(ids, skip_special_tokens=False)], [example]).correct == 1)
    return found


def run(args: argparse.Namespace) -> Iterator[SpectralRow]:
    """A row for each peer, and for each shrink, variant and number of bits."""
    with demo_model() as (model, tokenizer):
        moments = calibrated(args.calibrate, args.calibrating, tokenizer)
        codecs = [plain(name, *sides, model) for name, sides in PEERS.items()]
        for shrink in map(float, args.shrink.split(",")):
            for variant in args.variants.split(","):
                for bits in map(float, args.bits.split(",")):
                    name = f"spectral {bits:g}, shrink {shrink:g}, {variant}"
                    codecs.append(spectral(moments, bits, shrink, variant, name))
        with torch.inference_mode():
            found = task_texts(tokenizer, args.tasks, samples=args.samples, max_tokens=MAX_TOKENS, seed=SEED).texts
            texts = [Asked(model, text) for text in found]
            for codec in codecs:
                answers = answer(codec, args.tasks, args.answers, model, tokenizer) if args.answers else None
                yield measure(codec, texts, answers)


def spectral_table(rows: Sequence[SpectralRow], title: str) -> Table:
    """The rows for people."""
    columns: list[Column[SpectralRow]] = [
        Column("codec", lambda row: row.codec, is_text=True),
        Column("bits", lambda row: f"{row.bits:.2f}"),
        Column("nats a token", lambda row: f"{row.divergence:.2g}"),
        Column("top-1 differs", lambda row: f"{row.differs:.2%}"),
        Column("right", lambda row: "" if row.right is None else f"{row.right} of {row.asked}"),
    ]
    return from_rows(title, rows, columns, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code; Ctrl-C prints the rows there are."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.spectral", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--calibrate", default=",".join(CALIBRATION), metavar="LIST", help="tasks (default: %(default)s)")
    add("--calibrating", type=int, default=16, metavar="N", help="texts of them (default: %(default)s)")
    add("--tasks", default="ledger:40,lookup:100", metavar="LIST", help="measured (default: %(default)s)")
    add("--samples", type=int, default=8, metavar="N", help="texts compared (default: %(default)s)")
    add("--answers", type=int, default=0, metavar="N", help="questions a task (default: %(default)s)")
    add("--bits", default="2.25,2,1.75,1.5,1.4,1.25", metavar="LIST", help="with metadata (default: %(default)s)")
    add("--shrink", default=str(DEFAULT_SHRINK), metavar="LIST", help="default: %(default)s")
    add("--variants", default=VARIANTS[0], metavar="LIST", help=f"of {', '.join(VARIANTS)} (default: %(default)s)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    unknown = set(args.variants.split(",")) - set(VARIANTS)
    if unknown or not set(args.calibrate.split(",")) <= set(CALIBRATION):
        parser.error(f"choose --variants from {', '.join(VARIANTS)}, --calibrate from {', '.join(CALIBRATION)}")
    rows, code = results.collect(run(args))
    if rows:
        title = f"demo model, float32, calibrated on {args.calibrate}, measured on {args.tasks}"
        results.deliver(args, rows, spectral_table(rows, title))
    return code


if __name__ == "__main__":
    sys.exit(main())
