from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planning.findings import Finding, Severity
from sidecar.core.planning.volume_diagnosis import SpaceNeeds, VolumeFacts, volume_findings

SOUND = VolumeFacts(
    "/checkpoints", 10001, (10001,), 0, 10001, 0o2775, watches=65536, free_bytes=90 * 10**9, total_bytes=100 * 10**9
)
NEEDS = SpaceNeeds(None, 2, 0)
error = st.one_of(st.none(), st.text(min_size=1))
facts = st.builds(
    VolumeFacts,
    st.just("/checkpoints"),
    st.integers(0, 70_000),
    st.lists(st.integers(0, 70_000), min_size=1).map(tuple),
    missing=error,
    write_error=error,
    link_error=error,
    rename_error=error,
    inotify_error=error,
    watches=st.one_of(st.none(), st.integers(0, 10**6)),
    free_bytes=st.one_of(st.none(), st.integers(0, 10**12)),
    total_bytes=st.one_of(st.none(), st.integers(0, 10**12)),
    other_owners=st.lists(st.integers(0, 70_000)).map(tuple),
    state_error=error,
)
needs = st.builds(SpaceNeeds, st.one_of(st.none(), st.integers(1, 10**12)), st.integers(1, 5), st.integers(0, 10**10))


def by_check(found: VolumeFacts, wanted: SpaceNeeds = NEEDS) -> dict[str, Finding]:
    return {finding.check: finding for finding in volume_findings(found, wanted)}


def test_a_sound_volume_has_nothing_to_mend() -> None:
    assert {finding.severity for finding in volume_findings(SOUND, NEEDS)} == {Severity.OK}


WHO = "this process is user 10001, groups 10001; /checkpoints belongs to 0:10001, mode 2775"
LOST = "a checkpoint that the trainer deletes before it is uploaded is lost"
FSGROUP = "set the pod's securityContext.fsGroup, or run the sidecar as the trainer's user (inject --run-as-user)"
TEXTS: list[tuple[dict[str, object], str, str, str | None]] = [
    ({}, "volume", f"writable; {WHO}", None),
    ({"mode": None, "groups": (1, 2)}, "volume", "writable; this process is user 10001, groups 1, 2; ", None),
    (
        {"missing": "No such file"},
        "volume",
        "/checkpoints: No such file: the volume that trainer and sidecar share is not there",
        "mount it in this container, or correct CKPT_DIR",
    ),
    ({"write_error": "Permission denied"}, "volume", f"not writable: Permission denied; {WHO}", FSGROUP),
    (
        {"write_error": "Read-only file system"},
        "volume",
        f"not writable: Read-only file system; {WHO}",
        "mount the volume without readOnly, and look for disk errors on its node",
    ),
    (
        {"write_error": "No space left on device"},
        "volume",
        f"not writable: No space left on device; {WHO}",
        "free space on the volume, or enlarge it",
    ),
    ({}, "rename", "directories can be renamed", None),
    (
        {"rename_error": "not supported"},
        "rename",
        "a directory cannot be renamed: not supported: no resume can put a checkpoint in place",
        "use another file system for the volume",
    ),
    ({}, "hard-links", "files can be linked", None),
    ({"other_owners": (7,), "user": 0}, "hard-links", "files can be linked", None),
    (
        {"link_error": "not permitted"},
        "hard-links",
        f"no hard links: not permitted: {LOST}",
        "use a file system with hard links, or raise the trainer's save_total_limit",
    ),
    (
        {"other_owners": (7, 8), "user": 1},
        "hard-links",
        f"checkpoints of user 7, 8 are there, and files of other users may not be linked: {LOST}",
        "run the sidecar as the trainer's user (inject --run-as-user)",
    ),
    ({"watches": 1024}, "inotify", "changes of directories are reported at once", None),
    (
        {"watches": 1023},
        "inotify",
        "1023 watches for all of this user's processes on the node: beyond them changes are found by polling, later",
        "raise fs.inotify.max_user_watches on the node to 1024 or more",
    ),
    (
        {"inotify_error": "too many", "watches": 8},
        "inotify",
        "too many: changes are found by polling, later",
        "raise fs.inotify.max_user_instances and max_user_watches on the node",
    ),
    (
        {"state_error": "denied"},
        "state-directory",
        "CKPT_STATE_DIR: denied: the sidecar does not start",
        "mount a writable emptyDir there, or unset CKPT_STATE_DIR",
    ),
]


@pytest.mark.parametrize(("changed", "check", "text", "next_step"), TEXTS)
def test_what_was_found_is_said_with_the_next_step(
    changed: dict[str, object], check: str, text: str, next_step: str | None
) -> None:
    finding = by_check(replace(SOUND, **changed))[check]  # type: ignore[arg-type]
    assert (finding.text, finding.next_step) == (text, next_step)


GB = 10**9


@pytest.mark.parametrize(
    ("free_bytes", "wanted", "said"),
    [
        (90 * GB, NEEDS, Finding("space", Severity.OK, "90 GB of 100 GB are free")),
        (GB // 2, SpaceNeeds(None, 2, GB // 2), None),
        (37 * GB, SpaceNeeds(10 * GB, 2, GB), Finding("space", Severity.OK, "37 GB of 100 GB are free")),
        (
            37 * GB - 1,
            SpaceNeeds(10 * GB, 2, GB),
            Finding(
                "space",
                Severity.WARNING,
                "37 GB of 100 GB are free; 2 checkpoints (CKPT_KEEP_LOCAL), the one being written and CKPT_MIN_FREE take 37 GB",
                "enlarge the volume, or lower CKPT_KEEP_LOCAL: durable checkpoints are deleted earlier",
            ),
        ),
        (
            10 * GB - 1,
            SpaceNeeds(10 * GB, 2, GB),
            Finding(
                "space",
                Severity.FAILURE,
                "10 GB of 100 GB are free: not one checkpoint fits",
                "enlarge the volume to 37 GB",
                exit_code=2,
            ),
        ),
        (
            GB // 2,
            NEEDS,
            Finding(
                "space",
                Severity.WARNING,
                "500 MB of 100 GB are free: the volume is nearly full",
                "enlarge the volume or delete what it does not need",
            ),
        ),
    ],
)
def test_space_is_judged_by_what_has_to_fit(free_bytes: int, wanted: SpaceNeeds, said: Finding | None) -> None:
    finding = by_check(replace(SOUND, free_bytes=free_bytes), wanted)["space"]
    if said is None:
        assert finding.text.endswith("the volume is nearly full")
    else:
        assert finding == said
    if wanted.checkpoint_bytes is not None:
        one = by_check(replace(SOUND, free_bytes=wanted.checkpoint_bytes), wanted)["space"]
        assert one.severity is Severity.WARNING


def test_of_a_volume_that_cannot_be_written_links_and_watches_are_not_judged() -> None:
    assert set(by_check(replace(SOUND, write_error="no"))) == {"volume", "space"}
    assert set(by_check(replace(SOUND, free_bytes=None))) == {"volume", "rename", "hard-links", "inotify"}
    assert set(by_check(replace(SOUND, total_bytes=None))) == {"volume", "rename", "hard-links", "inotify"}
    assert list(by_check(replace(SOUND, missing="no"))) == ["volume"]


@given(facts, needs)
def test_every_finding_that_is_not_ok_has_a_next_step_and_no_check_comes_twice(found: VolumeFacts, wanted: SpaceNeeds) -> None:
    findings = list(volume_findings(found, wanted))
    assert findings
    assert all((finding.next_step is None) is (finding.severity is Severity.OK) for finding in findings)
    assert len({finding.check for finding in findings}) == len(findings)


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 10**11))
def test_more_free_space_is_never_judged_worse(one: int, other: int, size_bytes: int) -> None:
    order = [Severity.FAILURE, Severity.WARNING, Severity.OK]
    wanted = SpaceNeeds(size_bytes, 2, 0)
    less, more = (by_check(replace(SOUND, free_bytes=free), wanted)["space"].severity for free in sorted((one, other)))
    assert order.index(less) <= order.index(more)
    assert by_check(replace(SOUND, free_bytes=size_bytes - 1), wanted)["space"].severity is Severity.FAILURE


@pytest.mark.parametrize(
    ("changed", "check", "severity", "said"),
    [
        ({"missing": "No such file or directory"}, "volume", Severity.FAILURE, "CKPT_DIR"),
        ({"write_error": "Permission denied"}, "volume", Severity.FAILURE, "fsGroup"),
        ({"write_error": "No space left on device"}, "volume", Severity.FAILURE, "free space"),
        ({"write_error": "Disk quota exceeded"}, "volume", Severity.FAILURE, "free space"),
        ({"write_error": "Read-only file system"}, "volume", Severity.FAILURE, "readOnly"),
        ({"rename_error": "Operation not supported"}, "rename", Severity.FAILURE, "file system"),
        ({"link_error": "Operation not permitted"}, "hard-links", Severity.WARNING, "hard links"),
        ({"other_owners": (7,)}, "hard-links", Severity.WARNING, "--run-as-user"),
        ({"other_owners": (7,), "user": 0}, "hard-links", Severity.OK, ""),
        ({"inotify_error": "Too many open files"}, "inotify", Severity.WARNING, "max_user_instances"),
        ({"watches": 8}, "inotify", Severity.WARNING, "max_user_watches"),
        ({"free_bytes": 9 * 10**8}, "space", Severity.WARNING, "enlarge"),
        ({"state_error": "Permission denied"}, "state-directory", Severity.FAILURE, "emptyDir"),
    ],
)
def test_each_trouble_has_its_check_and_its_remedy(
    changed: dict[str, object], check: str, severity: Severity, said: str
) -> None:
    finding = by_check(replace(SOUND, **changed))[check]  # type: ignore[arg-type]
    assert finding.severity is severity
    assert said in (finding.next_step or "")
