"""What builds and runs the project elsewhere: the container, the compose file, the workflow, the issue templates."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from qkv_engine.cli.main import _parse
from qkv_engine.serve.limits import Limits

from .doc_pages import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSIONS = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_image_gets_what_the_wheel_is_built_of_and_nothing_else() -> None:
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    roots = set(SETTINGS["tool"]["setuptools"]["package-dir"].values())
    files = {"pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"}
    assert first == "*"
    assert {line[1:] for line in kept if line.startswith("!")} == roots | files
    assert all((ROOT / name).exists() for name in roots | files)


def test_the_image_installs_an_extra_and_serves() -> None:
    extras = re.findall(r"qkv-engine\[(\w+)\]", DOCKERFILE)
    assert extras == ["serve"] and set(extras) <= set(SETTINGS["project"]["optional-dependencies"])
    assert re.findall(r"^FROM python:(3\.\d+)", DOCKERFILE, re.MULTILINE)[0] in VERSIONS
    (entry,), (words,) = (re.findall(rf"^{kind} (\[.*\])$", DOCKERFILE, re.MULTILINE) for kind in ("ENTRYPOINT", "CMD"))
    assert json.loads(entry) == ["qkv-engine"]
    options = _parse(json.loads(words))
    assert (options.command, options.host, options.port) == ("serve", "0.0.0.0", 8000)


def test_compose_serves_with_keys_and_waits_for_requests() -> None:
    compose = load("compose.yaml")
    service = compose["services"]["qkv-engine"]
    options = _parse(service["command"])
    assert str(options.api_key_file) == "/run/secrets/keys" and service["secrets"] == list(compose["secrets"])
    assert service["ports"] == [f"127.0.0.1:8000:{options.port}"]
    assert int(service["stop_grace_period"].removesuffix("s")) > Limits().drain_timeout
    assert {volume.split(":")[0] for volume in service["volumes"]} == set(compose["volumes"])


def test_the_workflow_tests_each_named_version_by_targets_that_exist() -> None:
    jobs = load(".github/workflows/test.yml")["jobs"]
    assert VERSIONS == jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert all(job["timeout-minutes"] for job in jobs.values())
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {command.split()[1] for command in commands if command.startswith("make ")}
    assert targets == {"test", "docs"}
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


def test_issue_templates_and_citation_are_whole() -> None:
    for path in sorted(Path(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")):
        if path.name != "config.yml":
            form = load(str(path.relative_to(ROOT)))
            assert form["name"] and form["description"] and form["body"]
    citation = load("CITATION.cff")
    assert citation["license"] == SETTINGS["project"]["license"]
    assert citation["abstract"] == SETTINGS["project"]["description"]
    assert citation["repository-code"] == SETTINGS["project"]["urls"]["Repository"]
