"""The store's health: what a person is told of a store that is away, late, or refuses a request again and again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.store_state import Evidence, StoreState, store_state
from sidecar.errors import AccessRefused, StoreBusy, StoreFull, StoreUnavailable
from sidecar.transfer.health import LASTS_S, REPORT_S, Health

REFUSED, AWAY = AccessRefused("checkpoint-1/model: refused"), StoreUnavailable("away")


class World:
    """A fake clock, and a record of the events that ``Health`` reports."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.told: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.health = Health(self.happened, clock=lambda: self.now_s)

    def happened(self, event: str, **fields: Any) -> None:
        self.told.append(event)
        self.fields.append(fields)

    def evidence(self, sent_bytes: int = 0, *, is_limited: bool = False) -> Evidence:
        return self.health.evidence(sent_bytes=sent_bytes, is_limited=is_limited)

    def state(self) -> StoreState:
        return store_state(self.evidence(), grace_s=30.0)


@pytest.fixture
def world() -> World:
    return World()


def test_one_request_that_fails_for_good_is_told_until_it_ends_though_others_succeed(world: World) -> None:
    health = world.health
    for _ in range(5):
        health.failed(REFUSED, "upload")
        health.answered()
    assert health.trouble == str(REFUSED)
    assert health.unreachable is None, "other requests are answered"
    health.ended("upload")
    assert health.trouble is None
    assert world.told == ["store_degraded", "store_reached_again"]


def test_a_read_beside_a_full_store_does_not_end_its_trouble(world: World) -> None:
    health = world.health
    health.failed(StoreFull("no space"), "probe")
    health.answered()
    assert (health.trouble, health.unreachable, health.is_full) == ("no space", None, True)
    assert world.state() is StoreState.FULL
    health.ended("probe")
    assert not health.is_full
    assert world.told == ["store_degraded", "store_reached_again"]


def test_a_request_that_is_refused_again_and_again_does_not_make_a_store_that_answers_others_unreachable(world: World) -> None:
    health = world.health
    health.failed(REFUSED, "upload")
    for _ in range(3):
        health.answered()
        health.failed(REFUSED, "upload")
        assert health.unreachable is None, "listings and downloads still work"
        assert health.trouble == str(REFUSED)
    health.failed(AWAY, "upload")
    assert health.unreachable == str(AWAY), "nothing was answered since the last failure"


def test_a_store_that_refuses_uploads_is_not_usable_until_it_takes_one(world: World) -> None:
    health = world.health
    for _ in range(2):
        health.failed(REFUSED, "upload", is_upload=True)
        health.answered()
    assert world.state() is StoreState.REFUSES
    health.upload_begins()
    health.upload_ended(is_stored=True)
    assert world.state() is StoreState.ANSWERS, "one file is refused, not all"
    health.failed(REFUSED, "upload", is_upload=True)
    health.answered()
    health.failed(REFUSED, "upload", is_upload=True)
    assert world.state() is StoreState.REFUSES
    health.ended("upload")
    assert world.state() is StoreState.ANSWERS


def test_a_refused_deletion_is_no_refused_upload(world: World) -> None:
    for _ in range(2):
        world.health.failed(REFUSED, "deletion")
        world.health.answered()
    assert world.state() is StoreState.ANSWERS
    assert world.health.trouble is not None


@pytest.mark.parametrize("error", [AWAY, REFUSED, StoreBusy("slow down")])
def test_a_store_is_away_where_it_does_not_even_answer_a_small_read(world: World, error: Any) -> None:
    health, health.is_watched = world.health, True
    health.answered()
    health.failed(error, "upload")
    assert (health.is_away, world.state()) == (False, StoreState.ANSWERS), "it may be this upload alone"
    health.asking()
    health.failed(error, "watch")
    health.asked(is_answered=False)
    assert (health.is_away, world.state()) == (True, StoreState.AWAY)
    health.answered()
    assert (health.is_away, world.state()) == (False, StoreState.ANSWERS)


def test_before_anybody_asks_the_first_failure_counts(world: World) -> None:
    world.health.failed(AWAY, "probe")
    assert world.state() is StoreState.AWAY


def test_a_store_that_is_back_is_told_with_the_first_success_and_how_long_it_was_away(world: World) -> None:
    health = world.health
    for request in ("one", "other", "one", "other"):
        health.failed(AWAY, request)
        world.now_s += 10
    assert (health.trouble, health.unreachable) == (str(AWAY), str(AWAY))
    health.answered()
    assert health.trouble is None
    assert world.told == ["store_degraded", "store_reached_again"]
    assert world.fields[-1] == {"after_s": 40.0, "failures": 4}


def test_a_request_that_is_given_up_is_trouble_until_another_succeeds(world: World) -> None:
    world.health.given_up(AWAY)
    world.health.ended("listing")
    assert world.health.trouble == str(AWAY)
    world.health.answered()
    assert world.health.trouble is None
    assert world.told == [], "its caller reports it"


def test_trouble_that_lasts_is_reported_once_a_minute_with_what_is_pending(world: World) -> None:
    for second in range(185):
        world.health.failed(AWAY, second % 30)
        world.health.report(pending=second)
        world.now_s += 1
    assert world.told == ["store_degraded", *["store_still_degraded"] * 3]
    assert [fields["pending"] for fields in world.fields[1:]] == [60, 120, 180]


def test_a_store_that_fails_now_and_then_does_not_fill_the_log(world: World) -> None:
    for _ in range(600):
        world.health.failed(AWAY, "upload")
        world.health.report(pending=1)
        world.health.answered()
        world.now_s += 1
    assert len(world.told) <= 2 * (600 / REPORT_S + 1)


def test_trouble_soon_after_trouble_is_reported_if_it_lasts(world: World) -> None:
    world.health.failed(AWAY, "upload")
    world.health.answered()
    world.health.ended("upload")
    world.now_s += 30
    world.health.failed(AWAY, "upload")
    world.health.report()
    assert world.told == ["store_degraded", "store_reached_again"]
    world.now_s += LASTS_S
    world.health.report()
    assert world.told[2:] == ["store_degraded"]
    world.health.answered()
    world.health.ended("upload")
    assert world.told[3:] == ["store_reached_again"]
    assert world.fields[-1]["after_s"] == LASTS_S


def test_a_small_request_is_late_by_what_is_usual(world: World) -> None:
    world.health.answered()
    assert world.state() is StoreState.ANSWERS
    for _ in range(20):  # a store that takes six seconds each time
        world.health.asking()
        world.now_s += 6
        world.health.answered()
        world.health.asked(is_answered=True)
    world.health.asking()
    world.now_s += 8
    assert world.state() is StoreState.ANSWERS
    world.now_s += 2
    assert world.state() is StoreState.UNKNOWN
    world.now_s += 30
    assert world.state() is StoreState.SILENT
    world.health.answered()
    assert world.state() is StoreState.ANSWERS, "another request was answered meanwhile"


def test_uploads_that_do_not_move_are_late_though_other_requests_are_answered(world: World) -> None:
    world.health.upload_begins()
    for second in range(12):
        world.health.answered()
        assert world.state() is (StoreState.ANSWERS if second <= 10 else StoreState.UNKNOWN)
        world.now_s += 1
    assert world.evidence(1).still_ago_s == 0, "a byte was sent"
    world.now_s += 60
    assert world.evidence(1).still_ago_s == 60
    assert world.evidence(1, is_limited=True).still_ago_s == 0, "they wait for the bandwidth limit"
    world.now_s += 60
    world.health.upload_ended(is_stored=True)
    assert world.evidence(1).still_ago_s == 0, "none is under way"


steps = st.sampled_from(["failed", "answered", "ended", "report"])


@given(st.lists(st.tuples(steps, st.integers(0, 3), st.floats(0, 100)), max_size=60))
def test_reports_alternate_and_a_healthy_end_leaves_nothing(course: list[tuple[str, int, float]]) -> None:
    world = World()
    health = world.health
    for step, request, later_s in course:
        match step:
            case "failed":
                health.failed(AWAY, request)
            case "answered":
                health.answered()
            case "report":
                health.report()
                assert health.trouble is None or world.now_s - max(health._reported_s, health._began_s) < REPORT_S
            case _:
                health.ended(request)
        world.now_s += later_s
        assert health.trouble is not None or world.told[-1:] in ([], ["store_reached_again"])
        assert health.unreachable is None or health.trouble == health.unreachable
    borders = [event for event in world.told if event != "store_still_degraded"]
    assert borders[::2] == ["store_degraded"] * len(borders[::2])
    assert borders[1::2] == ["store_reached_again"] * len(borders[1::2])
    for request in range(4):
        health.ended(request)
    health.answered()
    assert health.trouble is None
