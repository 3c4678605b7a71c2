"""A save of several nodes is durable if it is so on every one of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.job.save import job_save

one = st.fixed_dictionaries(
    {"state": st.sampled_from(["durable", "saved", "asked", "failed", "other"])},
    optional={"checkpoint": st.none() | st.sampled_from(["checkpoint-9", "checkpoint-10"]), "detail": st.text(max_size=5)},
)
answers = st.dictionaries(st.sampled_from(["run-0", "run-1", "run-2"]), one | st.just({"error": "no sidecar answers"}))


@given(answers)
def test_it_is_durable_only_if_every_pod_says_so(given_answers: dict[str, dict[str, Any]]) -> None:
    found = job_save(given_answers)
    states = [answer.get("state") for answer in given_answers.values()]
    assert found.is_durable == (bool(states) and set(states) == {"durable"})
    assert set(found.problems) == {pod for pod, answer in given_answers.items() if answer.get("state") != "durable"}


def test_the_newest_checkpoint_is_named_by_its_step() -> None:
    found = job_save({pod: {"state": "durable", "checkpoint": f"checkpoint-{step}"} for pod, step in (("a", 9), ("b", 10))})
    assert (found.checkpoint, found.is_durable) == ("checkpoint-10", True)


def test_the_worst_state_is_that_of_the_job_and_a_problem_has_its_reason() -> None:
    durable, saved, asked = ({"state": state} for state in ("durable", "saved", "asked"))
    failed = {"state": "failed", "detail": "no space"}
    order = [durable, saved, asked, failed]
    for at, worst in enumerate(order):
        found = job_save({str(number): answer for number, answer in enumerate(order[: at + 1])})
        assert found.state == worst["state"]
    assert found.problems == {"1": "saved", "2": "asked", "3": "no space"}
    assert job_save({}).state == "failed"
    assert job_save({"a": {"state": "other"}}).problems == {"a": "failed"}
    assert job_save({"a": {"state": "durable", "error": "gone", "detail": "d"}}).problems == {"a": "gone"}


def test_final_is_newer_than_every_step() -> None:
    names = ["checkpoint-9", "final", "checkpoint-10"]
    assert job_save({name: {"state": "durable", "checkpoint": name} for name in names}).checkpoint == "final"
    assert job_save({"a": {"state": "asked", "checkpoint": None}}).checkpoint is None


def test_a_pod_that_could_not_be_asked_is_named_with_its_error() -> None:
    found = job_save({"a": {"state": "durable", "checkpoint": "checkpoint-9"}, "b": {"error": "no sidecar answers"}})
    assert (found.state, dict(found.problems)) == ("failed", {"b": "no sidecar answers"})
