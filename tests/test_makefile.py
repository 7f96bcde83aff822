"""The environment that ``make`` sets up: which PyTorch is asked for, of which index, and what is said before."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Stands in for `python3 -m venv .venv`; its pip notes what it is asked for.
PYTHON = """#!/bin/sh
mkdir -p .venv/bin
cat >.venv/bin/pip <<'END'
#!/bin/sh
case "$1" in
    config)  # more than a pipe holds, so that a reader who leaves early is noticed
        trap '' PIPE
        n=0
        while [ $n -lt 5000 ]; do
            n=$((n + 1))
            echo ":env:.${PIP_OPTION:-timeout}='$n'" 2>/dev/null || break
        done
        [ $n = 5000 ] || echo 'ERROR: Pipe to stdout was broken' >&2 ;;
    index) exit ${NO_INDEX:-0} ;;
    *) echo "pip $*" >>asked ;;
esac
END
chmod +x .venv/bin/pip
"""


def set_up(folder: Path, *words: str, gpu: bool = False, **env: str) -> tuple[str, str]:
    """What ``make`` prints, and what it asks of pip."""
    shutil.copy(ROOT / "Makefile", folder)
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sh", "grep", "touch", "mkdir", "cat", "chmod", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    for name, script in [("python3", PYTHON)] + [("nvidia-smi", "#!/bin/sh\n")] * gpu:
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    command = [str(shutil.which("make")), "--no-print-directory", ".venv/.torch", *words]
    done = subprocess.run(command, cwd=folder, env={"PATH": str(programs), **env}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / ".venv/.torch").exists()
    return done.stdout.replace("python3 -m venv .venv\n", ""), (folder / "asked").read_text()


def test_without_a_gpu_the_cpu_build_comes_from_its_own_index(tmp_path: Path) -> None:
    assert set_up(tmp_path) == ("", f"pip install -q --index-url {CPU_INDEX} torch==2.13.0\n")


def test_an_index_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    said, asked = set_up(tmp_path, NO_INDEX="1")
    assert said == f"PyTorch: {CPU_INDEX} cannot be reached; taking the build of PyPI, some gigabytes\n"
    assert asked == "pip install -q torch==2.13.0\n"


@pytest.mark.parametrize("option", ["index-url", "extra-index-url", "find-links"])
def test_a_configured_pip_is_asked_for_the_same_version(tmp_path: Path, option: str) -> None:
    said, asked = set_up(tmp_path, PIP_OPTION=option)
    assert said == "PyTorch: from where pip is configured to look\n"
    assert asked == "pip install -q torch==2.13.0\n"


def test_an_index_that_is_named_is_taken(tmp_path: Path) -> None:
    _, asked = set_up(tmp_path, "TORCH_INDEX=https://wheels.example", PIP_OPTION="index-url")
    assert asked == "pip install -q --index-url https://wheels.example torch==2.13.0\n"


def test_with_a_gpu_the_newest_is_taken_and_its_size_said(tmp_path: Path) -> None:
    said, asked = set_up(tmp_path, gpu=True)
    assert said == "PyTorch: the build with CUDA libraries, some gigabytes\n"
    assert asked == "pip install -q torch\n"


def test_the_version_is_of_your_choice(tmp_path: Path) -> None:
    _, asked = set_up(tmp_path, "TORCH=torch>=2.14")
    assert asked == f"pip install -q --index-url {CPU_INDEX} torch>=2.14\n"
