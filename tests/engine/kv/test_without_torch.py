"""The books and the scheduler know plain numbers alone: they import without torch, and without kernels."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = """
import sys
from importlib import import_module
from pkgutil import iter_modules

sys.modules["torch"] = None  # whoever imports it gets an ImportError
for name in ("request", "config", "errors", "window", "table_words", "kv", "kv_store", "scheduler"):
    module = import_module(f"qkv_engine.{name}")
    for found in iter_modules(getattr(module, "__path__", ())):
        import_module(f"{module.__name__}.{found.name}")
print(*sorted(name for name in sys.modules if name.startswith("qkv_engine.")))
"""


def test_books_and_scheduler_import_without_torch():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert {"qkv_engine.kv.manager", "qkv_engine.kv.moves", "qkv_engine.scheduler.pressure"} <= set(loaded)
    above = ("kernels", "device", "models", "serving")
    assert not [name for name in loaded if name.split(".")[1] in above]
