"""Trains a tiny hybrid, three layers with states to one with attention: ``python -m studies.train_hybrid``.

It is there to measure what formats of states cost on two demo tasks, and ships nowhere. Rows are conversations of
several turns, so that states last. The model is a plain training copy of Qwen3.5; its delta rule is the engine's.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from qkv_engine.bench import tasks
from qkv_engine.kernels.delta_net.cpu import delta_rule
from qkv_engine.kernels.delta_net.reference import gated_rms_norm, gates

from .train_demo import DEVICE, MLP, encode, export, make_optimizer, rope

DEMO = Path(__file__).resolve().parents[1] / "engine" / "assets" / "demo"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


class Norm(nn.Module):
    """RMSNorm whose weight counts from 1."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight.float(), 1e-6).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm over a head, times SiLU of a gate."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return gated_rms_norm(x, z, self.weight, 1e-6)


class DeltaNet(nn.Module):
    """A gated delta-net of rows that begin with empty states."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.k_heads, self.v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.k_dim, self.v_dim, width = (
            c["linear_key_head_dim"],
            c["linear_value_head_dim"],
            c["linear_conv_kernel_dim"],
        )
        keys, values, hidden = self.k_heads * self.k_dim, self.v_heads * self.v_dim, c["hidden_size"]
        self.in_proj_qkv = nn.Linear(hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b, self.in_proj_a = (nn.Linear(hidden, self.v_heads, bias=False) for _ in range(2))
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, width, bias=False)
        self.conv1d.weight = nn.Parameter(torch.randn(2 * keys + values, 1, width) * width**-0.5)
        self.A_log = nn.Parameter(torch.empty(self.v_heads).uniform_(1, 16).log())
        steps = torch.empty(self.v_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps
        self.norm = GatedNorm(self.v_dim)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x and result [B, T, E]."""
        rows, length = x.shape[:2]
        weight = self.conv1d.weight[:, 0]
        padded = F.pad(self.in_proj_qkv(x), (0, 0, weight.shape[1] - 1, 0)).float()
        inputs = [padded[:, i : i + length] * weight[:, i] for i in range(weight.shape[1])]
        mixed = F.silu(torch.stack(inputs).sum(0))
        keys = self.k_heads * self.k_dim
        parts = torch.split(mixed, [keys, keys, self.v_heads * self.v_dim], dim=-1)
        q, k = (self._heads(part, self.k_dim) for part in parts[:2])
        beta, g = gates(self.in_proj_b(x), self.in_proj_a(x), self.A_log.exp(), self.dt_bias)
        beta, g = (each.transpose(0, 1).flatten(1) for each in (beta, g))
        state = x.new_zeros(rows * self.v_heads, self.k_dim, self.v_dim, dtype=torch.float32)
        with torch.autocast(DEVICE, enabled=False):
            out, _ = delta_rule(q, k, self._heads(parts[2], self.v_dim), beta, g, state)
        out = torch.unflatten(out, 1, (rows, self.v_heads)).transpose(0, 1).to(x.dtype)
        z = self.in_proj_z(x).unflatten(-1, (self.v_heads, self.v_dim))
        projected: Tensor = self.out_proj(self.norm(out, z).flatten(2))
        return projected

    def _heads(self, x: Tensor, size: int) -> Tensor:
        """[B, T, H D] as [T, B H, D]: rows of the batch are further heads."""
        return torch.unflatten(x.transpose(0, 1), -1, (-1, size)).flatten(1, 2)


class Attention(nn.Module):
    """Causal attention, a part of each head rotated, its output gated."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.head_dim, hidden = c["head_dim"], c["hidden_size"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, 2 * heads * self.head_dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)
        parameters = c["rope_parameters"]
        self.rotary = int(self.head_dim * parameters["partial_rotary_factor"])
        self.theta = parameters["rope_theta"]

    def forward(self, x: Tensor) -> Tensor:
        """x and result [B, T, E]."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self._rotate(self.q_norm(q)), self._rotate(self.k_norm(k)), v))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        projected: Tensor = self.o_proj((out * gate.sigmoid()).flatten(2))
        return projected

    def _rotate(self, x: Tensor) -> Tensor:
        """x [B, T, H, D] with its first channels rotated by the position in T."""
        exponents = torch.arange(0, self.rotary, 2, device=x.device) / self.rotary
        angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * self.theta**-exponents
        first, rest = torch.split(x, [self.rotary, x.shape[-1] - self.rotary], dim=-1)
        return torch.cat((rope(first, angles.cos(), angles.sin()), rest), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], kind: str):
        super().__init__()
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.mlp = MLP(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"]), Norm(c["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        x = x + mixer(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Model(nn.Module):
    """Qwen3.5 for training, with Hugging Face's parameter names less their ``model.`` prefix."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = Norm(c["hidden_size"])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * c["num_hidden_layers"]) if is_residual else 1.0
                nn.init.normal_(parameter, std=c["initializer_range"] / scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states ``[B, T, E]`` of ``ids [B, T]``, each row from position 0 on."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed


def turn(rng: random.Random, max_facts: int, max_digits: int) -> tasks.Turn:
    """A question of one of the two tasks: a look-up, or a sum of two numbers with at most ``max_digits`` digits."""
    if rng.random() < 0.5:
        return tasks.lookup(rng, rng.randint(1, max_facts))
    while True:
        found = tasks.addition(rng, 2)
        if len(found[2]) <= max_digits:
            return found


def rows(
    tokenizer: Tokenizer, *, seed: int, number: int, length: int, max_facts: int, max_digits: int
) -> Iterator[Tensor]:
    """Endless batches ``[number, 2, length + 1]`` int64: ids, and 1 for the model's own tokens."""
    rng = random.Random(seed)
    while True:
        batch = []
        for _ in range(number):
            row: tuple[list[int], list[int]] = [], []
            while len(row[0]) < length + 1:
                text = tasks.chat_text([turn(rng, max_facts, max_digits)])
                for column, values in zip(row, encode(tokenizer, text), strict=True):
                    column.extend(values)
            batch.append(torch.tensor([column[: length + 1] for column in row]))
        yield torch.stack(batch)


class Rows(IterableDataset[Tensor]):
    """``rows`` for a worker of a loader, which has texts of its own."""

    def __init__(self, tokenizer: Tokenizer, args: argparse.Namespace):
        self.make = partial(rows, tokenizer, number=args.rows, **sizes(args))
        self.seed = args.seed

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        return self.make(seed=1000 * self.seed + (worker.id if worker else 0))


def loss_and_right(model: Model, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the model's own tokens, and the share of them that is predicted."""
    ids, own = batch.to(DEVICE).unbind(1)
    mine = own[:, 1:] == 1
    with torch.autocast(DEVICE, torch.bfloat16):
        hidden = model(ids[:, :-1])[mine]
        logits = F.linear(hidden, model.embed_tokens.weight).float()
    targets = ids[:, 1:][mine]
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


def train(model: Model, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Steps until ``args.seconds`` have passed, the learning rate falls along a cosine; saved now and then."""
    optimizer, start, saved = make_optimizer(model, args.lr), time.monotonic(), 0.0
    context = "spawn" if args.workers else None  # tokenizers have threads, which a fork would not take along
    loader = DataLoader(
        Rows(tokenizer, args), batch_size=None, num_workers=args.workers, multiprocessing_context=context
    )
    for step, batch in enumerate(loader):
        elapsed = time.monotonic() - start
        if elapsed > args.seconds:
            break
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * elapsed / args.seconds))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup) * cosine
        loss, right = loss_and_right(model, batch)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"{elapsed:.0f} s  step {step}  loss {loss.item():.4f}  right {right.item():.3f}", flush=True)
        if elapsed - saved > args.save_every:
            export(model, tokenizer, args.out, CONFIG)
            saved = elapsed


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """What the rows are made of."""
    return {name: getattr(args, name) for name in ("length", "max_facts", "max_digits")}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write")
    parser.add_argument("--seconds", type=float, default=3000, help="training time")
    parser.add_argument("--save-every", type=float, default=300, help="seconds between exports")
    parser.add_argument("--rows", type=int, default=16, help="rows a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a row")
    parser.add_argument("--max-facts", type=int, default=4, help="facts of the largest look-up")
    parser.add_argument("--max-digits", type=int, default=3, help="digits of the largest sum")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=50, help="steps of rising learning rate")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU")
    parser.add_argument("--workers", type=int, default=0, help="processes that write texts")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO / "tokenizer.json", args.out / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    model = Model(CONFIG).to(DEVICE)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, args)
    export(model, tokenizer, args.out, CONFIG)
    with torch.no_grad():
        held_out = rows(tokenizer, seed=args.seed, number=64, **sizes(args))
        loss, right = loss_and_right(model, next(held_out))
    print(f"held out: loss {loss.item():.4f}, own tokens right {right.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
