from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.local_request import refusal

JSON = {"content-type": "application/json"}
OWN = {"host": "127.0.0.1:9470"}
names = st.from_regex(r"[a-z0-9.\[\]:@-]{0,20}", fullmatch=True)
sites = st.sampled_from(["same-origin", "same-site", "cross-site", "none", "", "same-origin, none"])


def test_a_refusal_says_what_to_do() -> None:
    assert refusal("GET", {}, any_host=False) == (
        421,
        "Not this host",
        "Host is '': this API answers to 127.0.0.1, localhost and [::1]; use one of them",
    )
    assert refusal("GET", OWN | {"origin": "null"}, any_host=False) == (
        403,
        "Foreign origin",
        "web pages of other sites are not answered: use curl, or type the address into a tab",
    )
    assert refusal("POST", OWN, any_host=False) == (
        403,
        "Header required",
        "POST needs 'Content-Type: application/json' with a JSON body such as {}, or the header 'X-Checkpoint-Sidecar: 1'",
    )


def status(method: str, headers: dict[str, str], *, any_host: bool = False) -> int | None:
    refused = refusal(method, headers, any_host=any_host)
    return None if refused is None else refused.status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9470", "localhost", "LocalHost:8080", "[::1]", "[::1]:9470"])
def test_loopback_names_with_any_port_are_answered(host: str) -> None:
    assert status("GET", {"host": host}) is None
    assert status("POST", {"host": host} | JSON) is None


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9470", "evil.example:9470", "10.0.0.7:9470"),
        *("[::2]", "127.0.0.1:9470@evil", "127.0.0.1\nx", "0.0.0.0", "127.0.0.1:", "localhost:123456"),
    ],
)
def test_any_other_name_is_not(host: str) -> None:
    assert status("GET", {"host": host}) == 421
    assert status("GET", {"host": host}, any_host=True) is None


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1", "http://localhost:9470", "127.0.0.1:9470"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_an_origin_that_is_not_the_called_one_is_foreign(origin: str, method: str) -> None:
    assert status(method, OWN | JSON | {"origin": origin}) == 403
    assert status(method, OWN | JSON | {"origin": origin}, any_host=True) == 403


def test_a_page_of_the_api_itself_and_a_typed_address_are_answered() -> None:
    assert status("GET", OWN | {"sec-fetch-site": "none"}) is None
    assert status("POST", OWN | JSON | {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:9470"}) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", ""])
def test_what_a_browser_asks_for_another_site_is_refused(site: str) -> None:
    assert status("GET", OWN | {"sec-fetch-site": site}) == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 403),
        ({"content-type": "text/plain"}, 403),
        ({"content-type": "application/x-www-form-urlencoded"}, 403),
        ({"content-type": "text/plain; application/json"}, 403),
        ({"content-type": "text/plain, application/json"}, 403),
        ({"content-type": "application/json; charset=utf-8"}, None),
        ({"content-type": "APPLICATION/JSON"}, None),
        ({"authorization": "Bearer x"}, None),
        ({"x-checkpoint-sidecar": "1"}, None),
    ],
)
def test_a_change_needs_a_header_that_no_page_can_send_without_asking(headers: dict[str, str], expected: int | None) -> None:
    assert status("POST", OWN | headers) == expected


@given(st.sampled_from(["GET", "POST"]), names, names, sites, st.booleans())
def test_a_page_of_another_site_is_never_answered(method: str, host: str, origin: str, site: str, any_host: bool) -> None:
    headers = {"host": host, "origin": f"http://{origin}", "sec-fetch-site": site} | JSON
    if refusal(method, headers, any_host=any_host) is None:
        assert origin == host
        assert site in ("same-origin", "none")
