"""HTTP proxy to a store: its address and its credentials."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

PORT = 80
"""Port of a proxy whose URL has none."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """Address of a proxy. ``authorization``: value of Proxy-Authorization, a secret; ``None`` if the URL has no user."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Headers for the proxy, which are never sent to the store."""
        return {} if self.authorization is None else {"Proxy-Authorization": self.authorization}


def is_exempt(host: str, no_proxy: str) -> bool:
    """Whether ``NO_PROXY`` names a host's IP address, or a network of it in CIDR notation. Names are the library's work."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return any(address in network for network in _networks(no_proxy))
    return False


def _networks(no_proxy: str) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            yield ipaddress.ip_network(entry.strip().strip("[]"), strict=False)


def proxy_at(url: str) -> HttpProxy:
    """Parse a proxy's URL from an environment variable: ``[http://][user[:password]@]host[:port]``, percent-encoded.

    Raises:
        ValueError: The URL is malformed, or the proxy is no HTTP proxy. The text does not quote it, because it may contain
            a password.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme.lower() not in ("http", "https"):  # https: many write it for a proxy of plain HTTP
        raise ValueError(f"HTTPS_PROXY or HTTP_PROXY names a {scheme[:16]} proxy, which is not supported: name an HTTP proxy")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or PORT
    except ValueError:
        host, port = None, 0
    if not host:
        raise ValueError("HTTPS_PROXY or HTTP_PROXY is no URL: percent-encode special characters of its user and password")
    if parts.username is None:
        return HttpProxy(host, port)
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return HttpProxy(host, port, f"Basic {base64.b64encode(user.encode()).decode()}")
