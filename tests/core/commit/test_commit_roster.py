from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.commit import decide, to_reupload
from sidecar.core.commit.commit_roster import (
    EAGER_NODES,
    GROUP,
    HANDOVER_S,
    POLLS_PER_S,
    PUBLISHED_PER_S,
    SHORTEST_POLL_S,
    CommitTurn,
    groups,
    has_bundle,
    members,
    missing_nodes,
)
from sidecar.core.format import keys
from tests.core.commit.test_commit import attempts
from trainer_hook.contract import Node

counts = st.integers(1, 99_999)


@given(counts)
def test_every_node_is_in_one_group_and_one_listing_finds_the_group(count: int) -> None:
    assert sum(len(members(group, count)) for group in groups(count)) == count
    group = groups(count)[-1]
    prefix = keys.manifests_of_group("checkpoint-1", "a", group)
    last = members(group, count)[-1]
    assert CommitTurn(Node(last, count)).group == group
    assert keys.manifest("checkpoint-1", "a", Node(last, count)).startswith(prefix)
    assert not keys.manifest("checkpoint-1", "a", Node(max(0, group * GROUP - 1), count)).startswith(prefix) or group == 0


def test_turns_of_one_node_by_the_size_of_its_job() -> None:
    def of(index: int, count: int) -> tuple[float, ...]:
        turn = CommitTurn(Node(index, count))
        return turn.position, turn.poll_s, turn.list_s, turn.publish_after_s, turn.patience_s(2)

    assert of(5, EAGER_NODES) == (5, SHORTEST_POLL_S, SHORTEST_POLL_S, 0.0, 0.0)
    assert of(5, EAGER_NODES + 1) == (5, SHORTEST_POLL_S, 6 * SHORTEST_POLL_S, 0.0, 2 * HANDOVER_S)
    assert of(2 * GROUP + 5, PUBLISHED_PER_S) == (5, PUBLISHED_PER_S / POLLS_PER_S, 6 * SHORTEST_POLL_S, 0.0, 2 * HANDOVER_S)
    assert of(PUBLISHED_PER_S, PUBLISHED_PER_S + 1)[3] == 1.0


def test_a_job_of_one_group_is_not_grouped_and_a_small_one_has_no_bundle() -> None:
    assert [CommitTurn(Node(0, count)).is_grouped for count in (GROUP, GROUP + 1)] == [False, True]
    assert [has_bundle(count) for count in (EAGER_NODES, EAGER_NODES + 1)] == [False, True]


@given(counts)
def test_all_nodes_together_ask_no_more_than_the_store_takes(count: int) -> None:
    seats = [CommitTurn(Node(index, count)) for index in members(0, count)]
    polls_per_s = count / seats[0].poll_s
    lists_per_s = sum(1 / seat.list_s for seat in seats) * len(groups(count))
    if count > EAGER_NODES:
        assert polls_per_s < 1001
        assert lists_per_s <= 6 * len(groups(count))
    assert count / max(1.0, CommitTurn(Node(count - 1, count)).publish_after_s) <= 3001


@given(st.integers(EAGER_NODES + 1, 99_999), st.data())
def test_of_two_nodes_of_a_group_the_lower_one_has_its_turn_first(count: int, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.lists(st.sampled_from(members(0, count)), min_size=2, max_size=2, unique=True)))
    one, other = CommitTurn(Node(first, count)), CommitTurn(Node(second, count))
    assert one.patience_s(one.position) < other.patience_s(other.position)
    assert CommitTurn(Node(0, count)).patience_s(0) == 0


@given(counts, st.data())
def test_what_is_missing_is_what_was_not_listed(count: int, data: st.DataObject) -> None:
    there = data.draw(st.sets(st.sampled_from(members(0, count))))
    listed = [keys.manifest("checkpoint-1", "a", Node(index, count)) for index in there]
    missing = missing_nodes("checkpoint-1", "a", members(0, count), count, there=listed)
    assert set(missing) == set(members(0, count)) - there


@given(attempts())
def test_what_a_node_is_asked_to_mend_is_what_it_would_decide_itself(attempt: object) -> None:
    manifests, listing, count = attempt  # type: ignore[misc]
    if len(manifests) < count:
        return
    asked = to_reupload(manifests, listing)
    for index in range(count):
        decision = decide(manifests, listing, me=Node(index, count))
        assert getattr(decision, "files", {}) == asked.get(index, {})


@given(counts)
def test_only_jobs_of_more_nodes_than_one_group_merge_in_two_stages(count: int) -> None:
    turn = CommitTurn(Node(count - 1, count))
    assert turn.is_grouped is (len(groups(count)) > 1)
    assert not (turn.is_grouped and turn.is_eager)
