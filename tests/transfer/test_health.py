"""The store's health: what a person is told of a store that is away, and of one that refuses a request again and again."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import AccessRefused, StoreFull, StoreUnavailable
from sidecar.transfer.health import Health

REFUSED, AWAY = AccessRefused("checkpoint-1/model: refused"), StoreUnavailable("away")


class Told(list[str]):
    def happened(self, event: str, **_: object) -> None:
        self.append(event)


def test_one_request_that_fails_for_good_is_told_until_it_ends_though_others_succeed() -> None:
    health = Health((told := Told()).happened)
    for _ in range(5):
        health.failed(REFUSED, "upload")
        health.succeeded()
    assert health.trouble == str(REFUSED)
    assert health.unreachable is None, "other requests are answered"
    assert len(told) <= 3, f"once for the first failure, and once because it lasts: {told}"
    health.ended("upload")
    assert health.trouble is None
    assert told[-1] == "store_reached_again"


def test_a_read_beside_a_full_store_does_not_end_its_trouble() -> None:
    health = Health((told := Told()).happened)
    health.failed(StoreFull("no space"), "probe")
    health.succeeded()
    assert (health.trouble, health.unreachable, health.is_full) == ("no space", None, True)
    assert told == ["store_degraded"]
    health.ended("probe")
    assert not health.is_full
    assert told == ["store_degraded", "store_reached_again"]


def test_a_request_that_is_refused_again_and_again_does_not_make_a_store_that_answers_others_unreachable() -> None:
    health = Health()
    health.failed(REFUSED, "upload")
    for _ in range(3):
        health.succeeded()
        health.failed(REFUSED, "upload")
        assert health.unreachable is None, "listings and downloads still work"
        assert health.trouble == str(REFUSED)
    health.failed(AWAY, "upload")
    assert health.unreachable == str(AWAY), "nothing was answered since the last failure"


def test_a_store_that_is_back_is_told_with_the_first_success() -> None:
    health = Health((told := Told()).happened)
    for request in ("one", "other", "one", "other"):
        health.failed(AWAY, request)
    assert (health.trouble, health.unreachable) == (str(AWAY), str(AWAY))
    health.succeeded()
    assert health.trouble is None
    assert told == ["store_degraded", "store_reached_again"]


def test_a_request_that_is_given_up_is_trouble_until_another_succeeds() -> None:
    health = Health()
    health.given_up(AWAY)
    health.ended("listing")
    assert health.trouble == str(AWAY)
    health.succeeded()
    assert health.trouble is None


@given(st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "ended"]), st.integers(0, 3)), max_size=40))
def test_events_alternate_and_say_what_the_state_is_and_a_healthy_end_leaves_nothing(steps: list[tuple[str, int]]) -> None:
    health = Health((told := Told()).happened)
    for step, request in steps:
        match step:
            case "failed":
                health.failed(AWAY, request)
            case "succeeded":
                health.succeeded()
            case _:
                health.ended(request)
        assert (health.trouble is not None) is (told[-1:] == ["store_degraded"])
        assert health.unreachable is None or health.trouble == health.unreachable
    assert all(one != following for one, following in itertools.pairwise(told))
    for request in range(4):
        health.ended(request)
    health.succeeded()
    assert health.trouble is None
