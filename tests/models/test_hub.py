"""The Hub path with the download replaced: what is asked for, and how its failures read. No network."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from qkv_engine.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Stands in for ``snapshot_download``: copies the matching files of ``source`` and records each call."""

    def __init__(self, source: Path, cache: Path):
        self.source = source
        self.folder = cache / "models--org--name" / "snapshots" / COMMIT
        self.calls: list[dict[str, object]] = []
        self.error: Exception | None = None

    def __call__(self, repo_id: str, **options: object) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        if self.error is not None:
            raise self.error
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.source.iterdir():
            if any(path.match(pattern) for pattern in options["allow_patterns"]):
                shutil.copy(path, self.folder)
        return str(self.folder)


@pytest.fixture
def hub(tiny_folder, tmp_path, monkeypatch) -> FakeHub:
    fake = FakeHub(tiny_folder, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_downloads_config_first_then_the_rest_of_that_commit(hub, load, logits_of, tiny_folder):
    for name in ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "tokenizer.json"):
        (tiny_folder / name).write_bytes(b"x")
    loaded = load("org/name", revision="main", token="hf_secret")
    assert loaded.folder == hub.folder and loaded.name == "org/name"
    assert {path.name for path in hub.folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    first, second = hub.calls
    assert first["allow_patterns"] == ["config.json"]
    assert (first["revision"], second["revision"]) == ("main", COMMIT)
    assert first["token"] == second["token"] == "hf_secret"
    assert torch.equal(logits_of(loaded, torch.arange(9)), logits_of(load(tiny_folder), torch.arange(9)))


def test_an_unsupported_model_costs_no_download(hub, load, tiny_folder):
    (tiny_folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        load("org/name")
    assert len(hub.calls) == 1


def test_random_weights_download_none(hub, load):
    load("org/name", load_format="random")
    assert not any("safetensors" in pattern for call in hub.calls for pattern in call["allow_patterns"])
    assert not (hub.folder / "model.safetensors").exists()


def test_a_local_folder_of_that_name_wins(hub, load, tiny_folder, tmp_path, monkeypatch):
    shutil.copytree(tiny_folder, tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert load("org/name").folder == Path("org/name")
    assert not hub.calls


def hub_error(kind: type[Exception], text: str) -> Exception:
    """One of the library's HTTP errors without the HTTP response that its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (hub_error(errors.GatedRepoError, "gated"), "gated. Accept.*licence.*HF_TOKEN"),
        (hub_error(errors.RepositoryNotFoundError, "absent"), "absent. Check the name"),
        (hub_error(errors.RevisionNotFoundError, "absent"), "absent. Check revision"),
        (
            errors.LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\nAn error"),
            "the Hub cannot be reached: Name or service not known. Check the network, ",
        ),
        (errors.OfflineModeIsEnabled("Cannot reach"), "it is not in the cache.* Unset HF_HUB_OFFLINE"),
        (ConnectionError("httpx.ConnectTimeout: no route."), "no route. Check the network"),
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError(), r"RuntimeError\. "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_name_the_model_and_a_remedy(hub, load, error, remedy):
    hub.error = error
    with pytest.raises(ModelError, match=f"^org/name could not be downloaded: {remedy}") as caught:
        load("org/name", token="hf_secret")
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b/c", "org/", "/name", "org/../x", "org/na me", "-x/y", "x" * 5000, "~x/y\0"])
def test_names_that_are_no_hub_names_are_not_sent(hub, load, name):
    with pytest.raises(ModelError, match="no such folder"):
        load(name)
    assert not hub.calls
