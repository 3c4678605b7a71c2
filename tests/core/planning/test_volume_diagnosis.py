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
