"""API keys: who may call, and as which tenant."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from qkv_engine.errors import ConfigError
from qkv_engine.validation import MAX_NAME_CHARS

MIN_KEY_CHARS = 8  # shorter keys can be guessed


class Keys:
    """The keys of a server and the tenant of each. Without keys, or with those of one tenant, all callers are "".

    ``tenant_of`` compares digests and looks at all of them, so that its time says nothing about a key.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()):
        """``keys`` are pairs of a tenant's name and a key, the operator's first. Raises ``ConfigError``."""
        self._tenants: dict[bytes, str] = {}
        for tenant, key in keys:
            _check(tenant, key)
            if self._tenants.setdefault(_digest(key), tenant) != tenant:
                raise ConfigError("two tenants have the same key", field="api_key", value=tenant)
        names = list(dict.fromkeys(self._tenants.values()))
        self.num_tenants = max(1, len(names))
        self._operator = names[0] if len(names) > 1 else ""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def is_operator(self, tenant: str | None) -> bool:
        """Whether figures of all tenants are for this one: the first, or the only one there is."""
        return tenant == self._operator

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant whose key the header ``Authorization: Bearer KEY`` has; None for nobody's."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = [tenant for digest, tenant in self._tenants.items() if hmac.compare_digest(digest, given)]
        if not found or scheme.lower() != "bearer":
            return None
        return found[0] if self.num_tenants > 1 else ""


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The header ``Authorization`` of a request, or what it would be with the key in ``x-api-key``, Anthropic's."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (key and f"Bearer {key}")


def read_keys(path: Path) -> list[tuple[str, str]]:
    """The lines of a key file: ``TENANT KEY``, or ``KEY`` alone, whose tenant is the number of its line.

    Empty lines and lines that begin with "#" are left out. Raises ``ConfigError``, which shows no key.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        message = f"cannot be read: {type(error).__name__}"
        raise ConfigError(message, field="api_key_file", value=str(path)) from error
    found: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if len(words) > 2 and not line.startswith("#"):
            remedy = f"Write TENANT KEY in line {number}"
            raise ConfigError("a line of several words", field="api_key_file", value=str(path), remedy=remedy)
        if words and not line.startswith("#"):
            found.append((words[0] if len(words) == 2 else f"key-{number}", words[-1]))
    if not found:
        raise ConfigError("holds no key", field="api_key_file", value=str(path), remedy="Write TENANT KEY in a line")
    return found


def _check(tenant: str, key: str) -> None:
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        remedy = f"Use at least {MIN_KEY_CHARS} printable ASCII characters without spaces"
        raise ConfigError(f"the key of {tenant} is not a key", remedy=remedy)
    if not tenant.isprintable() or len(tenant) > MAX_NAME_CHARS:
        remedy = f"Use at most {MAX_NAME_CHARS} printable characters"
        raise ConfigError("not a tenant's name", field="api_key_file", value=tenant, remedy=remedy)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
