"""What ``pyproject.toml`` cannot say: the packages below the roots that it maps, and README for a package index."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
settings = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))
roots = settings["tool"]["setuptools"]["package-dir"]
repository = settings["project"]["urls"]["Repository"]


def with_absolute_links(text: str) -> str:
    """Markdown whose pictures and links to files of the repository are found from elsewhere, too."""
    files = repository.replace("github.com", "raw.githubusercontent.com") + "/main"
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:)", rf"\1{files}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)", rf"\1{repository}/blob/main/", text)


setup(
    packages=[".".join(filter(None, (root, part))) for root in roots for part in ("", *find_packages(roots[root]))],
    long_description=with_absolute_links((HERE / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
