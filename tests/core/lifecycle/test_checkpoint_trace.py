"""Traces of checkpoints, from the events of a sidecar."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle import checkpoint_trace
from sidecar.core.lifecycle.checkpoint_trace import CheckpointTrace, CheckpointTraces, Span
from trainer_hook.contract import rfc3339

NAMES = ["finished", "uploading", "paused", "uploaded", "committed", "superseded", "lost", "given_up", "rejected"]


def played(*events: tuple[str, float, dict[str, Any]]) -> list[CheckpointTrace]:
    traces = CheckpointTraces()
    found = [
        traces.happened(f"checkpoint_{name}", {"checkpoint": "checkpoint-20"} | fields, at_s=at_s)
        for name, at_s, fields in events
    ]
    return [trace for trace in found if trace is not None]


def test_the_whole_way_has_four_parts() -> None:
    [trace] = played(
        ("finished", 100.0, {"step": 20, "size_bytes": 7, "files": 2, "created_at": rfc3339(99.0), "save_s": 4.0}),
        ("uploading", 101.0, {"already_sent_bytes": 3}),
        ("uploading", 102.0, {"already_sent_bytes": 5}),
        ("uploaded", 110.0, {}),
        ("uploaded", 111.0, {"reason": "waits for other nodes"}),
        ("committed", 112.0, {"attempt": "a1", "retries": 0, "unknown": object()}),
    )
    assert trace.whole == Span("checkpoint", 95.0, 112.0)
    assert trace.parts == (
        Span("save", 95.0, 99.0),
        Span("scan", 99.0, 100.0),
        Span("upload", 101.0, 110.0),
        Span("commit", 110.0, 112.0),
    )
    assert trace.error is None
    assert trace.attributes == {
        "checkpoint.name": "checkpoint-20",
        "checkpoint.step": 20,
        "checkpoint.size_bytes": 7,
        "checkpoint.files": 2,
        "checkpoint.sent_early_bytes": 5,
        "checkpoint.attempt": "a1",
        "checkpoint.retries": 0,
        "checkpoint.outcome": "committed",
    }


def test_a_checkpoint_that_is_lost_or_given_up_says_why_and_one_that_is_overtaken_is_no_error() -> None:
    begin = ("finished", 100.0, {"created_at": "not a time"}), ("uploading", 101.0, {})
    [lost] = played(*begin, ("lost", 103.0, {"reason": "its files changed"}))
    assert (lost.error, lost.parts) == ("its files changed", (Span("scan", 100.0, 100.0), Span("upload", 101.0, 103.0)))
    [given_up] = played(("finished", 100.0, {}), ("given_up", 103.0, {}))
    assert (given_up.error, given_up.attributes["checkpoint.outcome"]) == ("given-up", "given-up")
    [superseded] = played(*begin, ("superseded", 103.0, {"reason": "a newer one is durable"}))
    assert superseded.error is None


def test_a_short_save_is_a_part_and_one_that_took_no_time_is_none() -> None:
    for save_s, parts in ((0.5, ["save", "scan"]), (0.0, ["scan"])):
        [trace] = played(("finished", 100.0, {"save_s": save_s}), ("lost", 101.0, {}))
        assert [part.name for part in trace.parts] == parts


def test_what_this_process_did_not_upload_has_no_trace() -> None:
    assert played(("finished", 100.0, {}), ("committed", 101.0, {})) == []
    assert played(("uploading", 100.0, {}), ("committed", 101.0, {})) == []
    assert CheckpointTraces().happened("store_opened", {}, at_s=1.0) is None


def test_a_version_that_is_written_again_begins_anew() -> None:
    [trace] = played(
        ("finished", 100.0, {}),
        ("uploading", 101.0, {}),
        ("finished", 105.0, {}),
        ("uploading", 106.0, {}),
        ("committed", 107.0, {}),
    )
    assert (trace.whole.begin_s, trace.parts[-1]) == (105.0, Span("upload", 106.0, 107.0))


def test_checkpoints_that_never_end_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_trace, "MOST_KNOWN", 2)
    traces = CheckpointTraces()
    for step in range(5):
        traces.happened("checkpoint_finished", {"checkpoint": f"checkpoint-{step}"}, at_s=1.0)
        traces.happened("checkpoint_uploading", {"checkpoint": f"checkpoint-{step}"}, at_s=2.0)
    ended = [traces.happened("checkpoint_committed", {"checkpoint": f"checkpoint-{step}"}, at_s=3.0) for step in range(5)]
    assert [trace is not None for trace in ended] == [False, False, False, True, True]


def test_of_too_many_checkpoints_the_one_that_was_finished_first_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_trace, "MOST_KNOWN", 2)
    traces = CheckpointTraces()
    for step in (1, 2, 1, 3):
        traces.happened("checkpoint_finished", {"checkpoint": f"checkpoint-{step}"}, at_s=1.0)
    ended = [traces.happened("checkpoint_lost", {"checkpoint": f"checkpoint-{step}"}, at_s=2.0) for step in (1, 2, 3)]
    assert [trace is not None for trace in ended] == [True, False, True]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.floats(0, 1e3),
            st.fixed_dictionaries(
                {},
                optional={
                    "created_at": st.sampled_from([rfc3339(-1e9), rfc3339(5.0), rfc3339(1e6), "x"]),
                    "save_s": st.floats(-5, 50),
                },
            ),
        ),
        max_size=20,
    )
)
def test_whatever_happens_no_span_of_a_clock_that_goes_on_ends_before_it_begins(events: list[tuple[str, float, Any]]) -> None:
    now_s, ordered = 0.0, []
    for name, later_s, fields in events:
        now_s += later_s
        ordered.append((name, now_s, fields))
    for trace in played(*ordered):
        assert all(span.begin_s <= span.end_s for span in (trace.whole, *trace.parts))
        assert trace.whole.begin_s <= min(span.begin_s for span in trace.parts)
        assert trace.whole.end_s >= max(span.end_s for span in trace.parts)
        assert trace.whole.begin_s >= 0  # OTLP has no time before 1970, and the SDK lost the whole batch


def test_an_upload_of_what_was_found_in_the_store_before_begins_anew() -> None:
    [trace] = played(("finished", 0.0, {}), ("uploaded", 1.0, {}), ("uploading", 2.0, {}), ("committed", 3.0, {}))
    assert trace.parts[-1] == Span("upload", 2.0, 3.0)


def test_a_time_before_1970_is_not_believed() -> None:
    [trace] = played(
        ("finished", 100.0, {"created_at": rfc3339(-5.0), "save_s": 4.0}), ("uploading", 101.0, {}), ("committed", 102.0, {})
    )
    assert trace.parts[:2] == (Span("save", 96.0, 100.0), Span("scan", 100.0, 100.0))
    [trace] = played(("finished", 100.0, {"created_at": rfc3339(0.0)}), ("lost", 102.0, {}))
    assert trace.parts == (Span("scan", 0.0, 100.0),)
    [trace] = played(
        ("finished", 100.0, {"created_at": rfc3339(3.0), "save_s": 4.0}), ("uploading", 101.0, {}), ("committed", 102.0, {})
    )
    assert trace.whole == Span("checkpoint", 0.0, 102.0)
