"""The packages of the wheel: every folder with an ``__init__.py`` below the roots that ``pyproject.toml`` maps."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

settings = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text("utf-8"))
roots = settings["tool"]["setuptools"]["package-dir"]

setup(packages=[".".join(filter(None, (root, part))) for root in roots for part in ("", *find_packages(roots[root]))])
