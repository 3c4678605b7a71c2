"""Access rules of the local API: programs on the machine and people are answered, web pages of other sites are not.

A page in a browser can reach loopback ports: directly, through a name of its own that resolves to 127.0.0.1 (DNS rebinding), or
by posting a form. The browser reveals this in headers that no page can change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

HEADER = "X-Checkpoint-Sidecar"
"""Header of a deliberate request, with any value. Browsers need a CORS preflight for it, which this API never grants."""

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_OWN_SITE = frozenset({None, "same-origin", "none"})


class Refusal(NamedTuple):
    """Reason of a refused request, as the parts of a problem document."""

    status: int
    title: str
    detail: str


def refusal(method: str, headers: Mapping[str, str], *, any_host: bool) -> Refusal | None:
    """Return the reason to refuse a request, or ``None`` to answer it.

    Args:
        method: HTTP method in capitals.
        headers: Values by lower-case name; repeated headers are joined with a comma.
        any_host: Whether any Host header is accepted: the server listens on a unix socket, or for other machines.
    """
    host = headers.get("host", "")
    if not any_host and not _LOOPBACK.fullmatch(host):
        return Refusal(
            421, "Not this host", f"Host is {host[:80]!r}: this API answers to 127.0.0.1, localhost and [::1]; use one of them"
        )
    if _is_foreign(headers, host):
        return Refusal(
            403, "Foreign origin", "web pages of other sites are not answered: use curl, or type the address into a tab"
        )
    if method == "POST" and not _shows_intent(headers):  # for PUT, PATCH and DELETE browsers always send a preflight
        return Refusal(
            403,
            "Header required",
            f"POST needs 'Content-Type: application/json' with a JSON body such as {{}}, or the header '{HEADER}: 1'",
        )
    return None


def _is_foreign(headers: Mapping[str, str], host: str) -> bool:
    origin = headers.get("origin")
    is_own = origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
    return not is_own or headers.get("sec-fetch-site") not in _OWN_SITE


def _shows_intent(headers: Mapping[str, str]) -> bool:
    """Whether there is a header that a browser sends to another origin only after a preflight."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return content_type == "application/json" or "authorization" in headers or HEADER.lower() in headers
