"""The bases of ``qkv-engine plan --method spectral``: solved from a profile's moments, or taken from another plan."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qkv_engine.errors import ConfigError
from qkv_engine.input_files import read_input

if TYPE_CHECKING:
    from qkv_engine.fingerprint import ModelFingerprint
    from qkv_engine.models.llama import LlamaForCausalLM
    from qkv_engine.planner.moments import LayerSums, SideMoments
    from qkv_engine.planner.profile import Profile

MAX_NBYTES = 4 * 2**30  # of a file that is copied


def check(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for options of a new profile that bases have no use for."""
    if args.key_scale:
        remedy = "Leave it out: bases weigh the channels of K"
        raise ConfigError("no option of --method spectral", field="key_scale", value=True, remedy=remedy)


def check_target(plan: Path) -> None:
    """Raises ``ConfigError`` if the bases could not be written beside ``plan``."""
    from qkv_engine.bench.files import check_writable
    from qkv_engine.plan_file import BASES_SUFFIX

    check_writable(plan.with_suffix(BASES_SUFFIX), "output")


def begin(model: LlamaForCausalLM) -> list[LayerSums]:
    """Empty sums of the moments of each layer. Raises ``ConfigError`` if ``model`` takes no bases."""
    from qkv_engine.models.basis import check_bases
    from qkv_engine.planner.moments import LayerSums

    check_bases(model)
    return [LayerSums(spec.scale) for spec in model.config.attention]


def with_bases(
    profile: Profile, moments: Sequence[tuple[SideMoments, SideMoments]], shrink: float, model: ModelFingerprint
) -> tuple[Profile, bytes]:
    """``profile`` with the spectra of its ``moments`` and the digest of their bases, and the file of these."""
    from msgspec.structs import replace

    from qkv_engine.models.bases import bases_bytes
    from qkv_engine.planner.spectral import solve_spectra

    bases, spectra = solve_spectra(moments, shrink)
    data = bases_bytes(bases, model)
    return replace(profile, spectra=spectra, bases=hashlib.sha256(data).hexdigest()), data


def read(plan: Path, digest: str) -> bytes:
    """The file of bases beside ``plan``. Raises ``ConfigError`` unless it has this digest."""
    from qkv_engine.plan_file import bases_path

    path = bases_path(plan)
    data = read_input(path, field="source", max_nbytes=MAX_NBYTES)
    if hashlib.sha256(data).hexdigest() != digest:
        message = "not the bases that the plan was made with: their digest differs"
        raise ConfigError(message, field="source", value=str(path), remedy="Profile the model again")
    return data
