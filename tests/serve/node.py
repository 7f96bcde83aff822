"""Modules of the page that know no browser, run by Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qkv_engine.serve.page import FOLDER

PROGRAM = shutil.which("node")
needs_node = pytest.mark.skipif(PROGRAM is None, reason="needs node")


def page_modules(folder: Path) -> Path:
    """A copy of the page's modules in ``folder``, which Node.js takes for such."""
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def run(modules: Path, script: str, **given: Any) -> Any:
    """What the body of a function returns that has ``given`` by their names, and imports from "./"."""
    imports = [line for line in script.splitlines() if line.startswith("import ")]
    body = "\n".join(line for line in script.splitlines() if not line.startswith("import "))
    main = modules / "main.js"
    main.write_text(
        "\n".join(imports)
        + f"\nconst found = await (async ({{ {', '.join(given)} }}) => {{ {body} }})({json.dumps(given)});\n"
        + "process.stdout.write(JSON.stringify(found ?? null));\n"
    )
    done = subprocess.run([str(PROGRAM), str(main)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
