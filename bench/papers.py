"""The efficiency experiments of the papers: each one's setting, and the figures that it publishes.

Published figures stand beside ours and are never rows of ours: hardware, baseline and way of counting differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KVMIX_RANDOM = "kvmix-random"  # the kv that stands for KVmix's ladder with layers drawn at random


class Setting(NamedTuple):
    """Lengths in tokens, the batch grid, and memory: of weights and KV together, or of KV in requests at 16 bits."""

    input_len: int
    output_len: int
    batches: str
    memory: str | None = None
    kv_memory: str | None = None
    dtype: str | None = None
    repeats: int = 3
    warmup: int = 1


class Published(NamedTuple):
    """One published row: a system at a batch, its generated tokens a second, or whatever else was published.

    ``source`` is the place of the figures where it is not the paper itself.
    """

    system: str
    batch: int | None = None
    output_tok_s: int | None = None
    total_tok_s: int | None = None
    ratio: str = ""  # of throughput, over the baseline
    memory: str = ""
    note: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """An experiment: its setting in full for ``shape``, another for the demo model, and the published figures.

    ``kvs`` are the presets to compare, the baseline first. ``throughput`` is the published range of throughput over
    the paper's baseline, None where no such figure was published. ``notes`` say how to read figures beside ours.
    """

    name: str
    title: str
    source: str
    shape: str
    hardware: str
    baseline: str
    kvs: str
    full: Setting
    scaled: Setting
    published: tuple[Published, ...] = ()
    throughput: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


class Experiment(NamedTuple):
    """A paper's experiment as it was run."""

    paper: Paper
    is_scaled: bool

    @property
    def title(self) -> str:
        """The experiment's name, for tables and pictures."""
        return f"{self.paper.title}, scaled down" if self.is_scaled else self.paper.title

    @classmethod
    def of(cls, preset: str | None, model: str) -> Experiment | None:
        """The experiment in the rows of ``preset``, which is scaled down for the demo model; None without a preset."""
        return None if preset is None else cls(PAPERS[preset], model == "demo")


_RERUN = "authors' rerun, branch jisen/rerun"


def _rerun(system: str, rates: dict[int, int | None]) -> tuple[Published, ...]:
    """A row a batch of the rerun by Kitty's authors, of generated tokens a second; None is out of memory."""
    return tuple(
        Published(system, batch, rate, note="" if rate else "out of memory", source=_RERUN)
        for batch, rate in rates.items()
    )


_SCALED = Setting(64, 576, "1,2,max", kv_memory="4x", repeats=1, warmup=0)

_ALL = (
    Paper(
        name="kitty",
        title="Kitty, prompts that grow to 8,192 tokens",
        source="arXiv 2511.18643",
        shape="qwen3-8b",
        hardware="A100-80GB; the rerun's rows an H100-class GPU",
        baseline="eager Hugging Face in fp16, static and dynamic cache",
        kvs="bf16,kivi-4,kivi-2,kitty,kitty-pro,auto",
        full=Setting(65, 8127, "8,16,32,64,96,128,192,256,max", memory="80GiB", dtype="float16"),
        scaled=_SCALED,
        throughput=(2.1, 4.1),
        published=(
            Published("Kitty", ratio="2.1x to 4.1x", memory="8x the batch"),
            *_rerun("16 bits, static cache", {8: 233, 16: 498, 32: 1000, 64: None}),
            *_rerun("16 bits, dynamic cache", {8: 244, 16: 403, 32: 547, 64: None}),
            *_rerun("HF KIVI, 4 bits", {8: 161, 16: 206, 32: 239, 64: 255}),
            *_rerun(
                "Kitty-Pro",
                {8: 221, 16: 427, 32: 874, 64: 1467, 96: 1694, 128: 1902, 192: 2104, 256: 2211},
            ),
        ),
        notes=(
            "2.2x is over the static cache and 4.0x over the dynamic one, each at its largest batch; at equal batches "
            "Kitty-Pro has 0.86x to 0.95x the static cache's speed.",
            "8 times the batch comes of batches that are powers of two: 80 GB hold about 52 requests at 16 bits and "
            "290 of Kitty-Pro, 5.5 times as many.",
            "HF KIVI is the quantized cache of Hugging Face, which groups K along channels: not KIVI's K per channel.",
        ),
    ),
    Paper(
        name="kitty-prefill",
        title="Kitty, long prompts",
        source="arXiv 2511.18643",
        shape="qwen3-8b",
        hardware="an H100-class GPU (the authors' rerun)",
        baseline="eager Hugging Face in fp16, static and dynamic cache",
        kvs="bf16,kivi-2,kitty,kitty-pro,auto",
        full=Setting(8192, 100, "8,16,32", memory="80GiB", dtype="float16"),
        scaled=Setting(576, 64, "1,2,max", kv_memory="4x", repeats=1, warmup=0),
        throughput=(0.94, 1.18),
        published=(
            *_rerun("16 bits, static cache", {16: 188}),
            *_rerun("16 bits, dynamic cache", {16: 149}),
            *_rerun("Kitty", {16: 176, 32: None}),
        ),
        notes=(
            "Kitty runs out of memory at 32: its prefill is not made for little memory. At 16 it has 0.94x the "
            "static and 1.18x the dynamic cache's speed.",
        ),
    ),
    Paper(
        name="kvmix",
        title="KVmix, 688 tokens in and 1,024 out",
        source="arXiv 2506.08018",
        shape="llama-2-7b",
        hardware="RTX 4090, 24 GB",
        baseline="eager Hugging Face in fp16",
        kvs=f"bf16,kivi-2-g32,{KVMIX_RANDOM}",
        full=Setting(688, 1024, "4,8,16,30,max", memory="24GiB", dtype="float16"),
        scaled=_SCALED,
        throughput=(5.3, 5.3),
        published=(
            Published("KVmix", 30, 617, 1032, "5.3x", "4.9x less"),
            Published("16 bits", 4),
            Published("Atom", 18),
            Published("KIVI, window of 64", 28),
        ),
        notes=(
            "The paper counts prompt tokens: 1,032 total tok/s are 617 generated ones.",
            "Its batches are the largest that ran, or the first that failed: the paper can be read both ways.",
            "4.9x is peak memory less the model's, activations included; bytes of KV alone are 4.64x fewer.",
            f"{KVMIX_RANDOM} draws the layers of more bits at random, since random weights have no profile: bytes and "
            "speed are those of any such choice, answers are not.",
        ),
    ),
    Paper(
        name="kivi",
        title="KIVI, prompts as of ShareGPT",
        source="arXiv 2402.02750",
        shape="llama-2-7b",
        hardware="A100-80GB",
        baseline="16 bits",
        kvs="bf16,kivi-4-g32,kivi-2-g32,auto",
        full=Setting(160, 338, "8,32,96,max", memory="80GiB", dtype="float16"),
        scaled=_SCALED,
        throughput=(2.35, 3.47),
        published=(Published("KIVI, 2 bits", ratio="2.35x to 3.47x", memory="2.6x lower peak, up to 4x the batch"),),
        notes=("Its script runs a batch of 96, groups of 32, a window of 128 tokens, three repeats.",),
    ),
    Paper(
        name="patternkv",
        title="PatternKV, 1,024 tokens in and 256 out",
        source="arXiv 2510.05176",
        shape="llama-3.1-8b",
        hardware="H20-96GB",
        baseline="16 bits",
        kvs="bf16,kivi-2,patternkv",
        full=Setting(1024, 256, "16,32,48,64,96,128,160,max", memory="96GiB"),
        scaled=_SCALED,
        throughput=(1.15, 1.60),
        published=(
            Published("PatternKV", ratio="1.4x", memory="1.25x the batch", note="its abstract"),
            Published("PatternKV", 16, ratio="1.15x"),
            Published("PatternKV", 128, ratio="1.60x"),
            Published("PatternKV", 160, note="1.25x the batch is 160 after 128 in its grid"),
            Published("KIVI", 64, note="from 64 on 1.31x to 1.34x as fast as PatternKV"),
            Published("PatternKV", memory="0.389 GB a request", note="0.434 GB at 16 bits"),
        ),
        notes=(
            "Tok/s of its tables 10 and 11 are left out: latency, throughput and batch of every cell give 769 tokens a "
            "request, not the 256 or 1,280 that it states.",
            "Its memory is mostly that of the prompts' activations: KV of 1,280 tokens at 16 bits takes 0.168 GB.",
        ),
    ),
    Paper(
        name="xquant",
        title="XQuant, 1,024 tokens in and 128 out",
        source="arXiv 2510.11236",
        shape="mistral-7b",
        hardware="RTX 3090, 24 GB",
        baseline="KIVI",
        kvs="kivi-2-g32,xquant-g32,xquant,xquant-1.16,bf16",
        full=Setting(1024, 128, "16,max", memory="24GiB"),
        scaled=Setting(256, 384, "1,2,max", kv_memory="4x", repeats=1, warmup=0),
        published=(Published("XQuant", 16, note='"competitive with" KIVI; no number is given'),),
    ),
    Paper(
        name="pm-kvq",
        title="PM-KVQ, chains of thought of up to 32,768 tokens",
        source="arXiv 2505.18610",
        shape="llama-3.1-8b",
        hardware="RTX 4090, 24 GB, for the 7B and 8B models",
        baseline="16 bits; neither kernels nor script of the timing are released",
        kvs="bf16,pm-kvq-4,pm-kvq-2",
        full=Setting(128, 32640, "1,2,6,max", memory="24GiB"),
        scaled=_SCALED,
        throughput=(2.73, 5.18),
        published=(
            Published("PM-KVQ", ratio="2.73x to 5.18x", note="setting not published"),
            Published("R1-Distill-Llama-8B, 4 and 8 bits", 6, note="memory for KV was divided by 6 requests"),
            Published("R1-Distill-Qwen-7B, 2 bits", 40, note="0.219 GiB a request at 32K"),
            Published("R1-Distill-Qwen-14B", 12, note="A100-40GB"),
        ),
        notes=(
            "Accuracy was measured with one request and simulated quantization: its batches are shares of memory.",
            "pm-kvq-4 and pm-kvq-2 have the same floor in all layers; a plan's differ by layer.",
            "Steps under pressure jump with each rung: of --sampled the mean is rough, a full run has it.",
            "Its other settings: --shape qwen2.5-7b --batch-sweep 1,5,40,max; --shape qwen2.5-14b --memory 40GiB "
            "--batch-sweep 1,2,12,max.",
        ),
    ),
)
PAPERS: dict[str, Paper] = {paper.name: paper for paper in _ALL}
