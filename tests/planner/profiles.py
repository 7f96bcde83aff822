"""A profile with made-up numbers, for tests of what is made of one."""

from __future__ import annotations

import torch

from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.formats import make_format
from qkv_engine.models.config import ModelConfig
from qkv_engine.plan_file import KeyScale
from qkv_engine.planner.profile import LayerScores, Profile, Prompts, Sensitivities
from qkv_engine.planner.sensitivity import Candidates

PROMPTS = Prompts(source="ledger 40", count=2, tokens=300, max_tokens=1024)


def made_up_profile(config: ModelConfig | ModelFingerprint, key_scale: KeyScale | None = None) -> Profile:
    """Scores and sensitivities that rise with the layer; a quarter of the error for each bit more."""
    layers = range(config.num_layers)
    rising = [float(f"{(layer + 1) / 3:.6g}") for layer in layers]
    model = config if isinstance(config, ModelFingerprint) else ModelFingerprint.of("", config, None)
    candidates = Candidates.of_layers(model.kv_of_layers, torch.float32)[0]
    k, v = (
        {name: [float(f"{x * 4 ** -make_format(name, torch.float32).bits:.6g}") for x in rising] for name in names}
        for names in candidates
    )
    return Profile(
        dtype="float32",
        context=8192,
        position_scale=1,
        prompts=PROMPTS,
        key_scale=key_scale,
        scores=LayerScores(rising, rising),
        sensitivities=Sensitivities(k, v),
        key_outliers=[1.0] * len(layers),
        has_qk_norm=False,
    )
