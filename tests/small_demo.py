"""The demo model without its six middle layers, for tests that compare an engine with itself: a quarter of the work.

Its answers are wrong, and hang on far tokens of a prompt at least as much as those of the whole model.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

from qkv_engine.loading import demo_folder

BLOCK_NBYTES = 2**18  # of its KV in 16 bits, a quarter of the demo model's
LAYERS = {0: 0, 7: 1}
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@cache
def small_demo() -> Path:
    """A folder with its files, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="qkv-small-demo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(demo_folder(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(LAYERS)}))
    tensors = load_file(demo_folder() / "model.safetensors")
    save_file(
        {_renamed(name): tensor for name, tensor in tensors.items() if _is_kept(name)}, folder / "model.safetensors"
    )
    return folder


def _is_kept(name: str) -> bool:
    layer = _LAYER.search(name)
    return layer is None or int(layer[0]) in LAYERS


def _renamed(name: str) -> str:
    return _LAYER.sub(lambda layer: str(LAYERS[int(layer[0])]), name)
