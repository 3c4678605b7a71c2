"""Checkpoints in a listing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.summary import INCOMPLETE_FILE, StoredState, Summary, summaries
from sidecar.core.format import keys

PATHS = st.sampled_from(
    [
        ".complete",
        "model.safetensors",
        "sub/optimizer.pt",
        ".ckpt/a/node-00000-of-00001.json",
        ".ckpt/a/node-00001/model.safetensors",
        ".ckpt/quarantined-0123456789abcdef.json",
        ".ckpt/deletion.json",
        f"{INCOMPLETE_FILE}.node-0-rank-0",
    ]
)
NAMES = st.sampled_from(["checkpoint-1", "checkpoint-20", "final", "checkpoint-007", "runs", "checkpoint-1.tmp"])
OBJECTS = st.lists(
    st.tuples(st.builds("{}/{}".format, NAMES, PATHS), st.integers(0, 9), st.sampled_from("abc")), unique_by=lambda o: o[0]
)


@given(OBJECTS, st.randoms())
def test_the_order_of_a_listing_does_not_matter(objects: list[tuple[str, int, str]], random: object) -> None:
    shuffled = objects.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert summaries(objects) == summaries(shuffled) or _without_order(objects) == _without_order(shuffled)


def _without_order(objects: list[tuple[str, int, str]]) -> dict[str, object]:
    return {n: (s.state, s.size_bytes, s.objects, s.modified, sorted(s.quarantines)) for n, s in summaries(objects).items()}


@given(OBJECTS)
def test_a_checkpoint_is_committed_exactly_if_its_commit_is_listed(objects: list[tuple[str, int, str]]) -> None:
    listed = {key for key, _, _ in objects}
    for name, summary in summaries(objects).items():
        assert (summary.state is StoredState.COMMITTED) == (keys.commit(name) in listed)


@given(OBJECTS)
def test_documents_are_not_counted_and_files_of_nodes_are(objects: list[tuple[str, int, str]]) -> None:
    for name, summary in summaries(objects).items():
        of_it = [(key, size) for key, size, _ in objects if key.startswith(f"{name}/")]
        files = [size for key, size in of_it if not key.endswith((".complete", ".json"))]
        assert (summary.objects, summary.size_bytes) == (len(files), sum(files))


def test_the_time_of_a_checkpoint_is_that_of_its_commit_and_else_of_its_latest_object() -> None:
    objects = [("final/a", 1, "3"), ("final/b", 1, "5"), ("final/c", 1, "4")]
    assert summaries(objects)["final"].modified == "5"
    assert summaries([*objects, ("final/.complete", 1, "2"), ("final/d", 1, "9")])["final"].modified == "2"


def test_quarantine_records_are_found() -> None:
    record = "checkpoint-1/.ckpt/quarantined-0123456789abcdef.json"
    assert summaries([(record, 1, ""), ("checkpoint-1/.complete", 1, "")])["checkpoint-1"].quarantines == [record]


def test_objects_outside_of_checkpoints_are_ignored() -> None:
    assert summaries([("runs/events", 1, ""), ("checkpoint-1", 1, ""), ("run.json", 1, "")]) == {}


def test_what_has_neither_commit_nor_manifest_is_of_another_program() -> None:
    found = summaries(
        [("checkpoint-1/model", 1, ""), ("checkpoint-2/model", 1, ""), (f"checkpoint-2/{INCOMPLETE_FILE}", 0, "")]
    )
    assert {name: s.state for name, s in found.items()} == {
        "checkpoint-1": StoredState.FOREIGN,
        "checkpoint-2": StoredState.INCOMPLETE,
    }


@given(st.integers(0, 10**9))
def test_the_step_is_that_of_the_name(step: int) -> None:
    assert Summary(f"checkpoint-{step}").step == step
    assert Summary("final").step is None
