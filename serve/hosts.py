"""Checks of names: of the header ``Host``, which keeps other sites' pages from a server without keys, and of sites."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from qkv_engine.errors import ConfigError

from .errors import ApiError


class Hosts:
    """The names by which a server may be called: IP addresses, "localhost", and names of its own.

    A site can point its name at this machine (DNS rebinding), and its pages could then read what the server answers.
    The name stays in their requests, and no site's name is an IP address.
    """

    def __init__(self, names: Iterable[str] = ()):
        self._names = {"localhost", *map(_name_of, names)} - {""}

    def check(self, host: str | None) -> None:
        """Raises ``ApiError`` for the header of a request to another name. Browsers always send one."""
        if host is None:
            return
        name = _name_of(host)
        if name not in self._names and not _is_address(name):
            message = f"this server is not {host[:80]!r}; it may be started with --allow-host NAME, or with keys"
            raise ApiError(421, message, code="unknown_host")


def check_origin(origin: str) -> str:
    """``origin``, if a browser may name a site so. Raises ``ConfigError``."""
    scheme, _, place = origin.partition("://")
    if origin != "*" and (not scheme or not _name_of(place) or "/" in place or origin != origin.lower()):
        remedy = 'Give it as browsers do, such as https://ours.example or http://localhost:3000, or "*" for all'
        raise ConfigError("no site", field="allow_origin", value=origin, remedy=remedy)
    return origin


def _name_of(host: str) -> str:
    """The name or address in ``host``, without its port and brackets; "" where it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
