from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planning.findings import Finding, Severity, exit_code_of
from sidecar.core.planning.store_diagnosis import (
    NEEDS,
    Operation,
    StoreFacts,
    Tried,
    Trouble,
    store_findings,
    trouble_of_code,
)

SOUND = StoreFacts(
    "s3://bucket/run",
    tried=tuple(map(Tried, Operation)),
    verification="store-crc",
    conditional_put=True,
    round_trip_s=0.01,
    skew_s=0.0,
    is_encrypted=True,
    up_bytes_per_s=1e8,
    down_bytes_per_s=2e8,
)
tried = st.sets(st.sampled_from(Operation)).flatmap(
    lambda failed: st.just(tuple(Tried(o, "no" if o in failed else None, is_denied=o in failed) for o in Operation))
)
facts = st.builds(
    StoreFacts,
    st.just("s3://bucket/run"),
    trouble=st.one_of(st.none(), st.tuples(st.sampled_from(Trouble), st.text(min_size=1))),
    tried=tried,
    verification=st.sampled_from([None, "store-crc", "signed-sha256", "md5", "fsync", "read-back", "off"]),
    conditional_put=st.sampled_from([None, True, False]),
    round_trip_s=st.one_of(st.none(), st.floats(0, 10)),
    skew_s=st.one_of(st.none(), st.floats(-1e6, 1e6)),
    is_encrypted=st.sampled_from([None, True, False]),
    verifies_tls=st.booleans(),
    up_bytes_per_s=st.one_of(st.none(), st.floats(0, 1e11)),
    rate_error=st.one_of(st.none(), st.text(min_size=1)),
    is_rate_refused=st.booleans(),
    left_behind=st.lists(st.text(min_size=1), max_size=2).map(tuple),
)


def by_check(found: StoreFacts) -> dict[str, Finding]:
    return {finding.check: finding for finding in store_findings(found)}


def test_a_sound_store_has_nothing_to_mend() -> None:
    assert {finding.severity for finding in store_findings(SOUND)} == {Severity.OK}


@pytest.mark.parametrize(("skew_s", "severity"), [(1.0, Severity.OK), (-60.0, Severity.WARNING), (3600.0, Severity.FAILURE)])
def test_a_clock_is_judged_by_what_s3_accepts(skew_s: float, severity: Severity) -> None:
    assert by_check(replace(SOUND, skew_s=skew_s))["clock"].severity is severity


@pytest.mark.parametrize("verification", ["read-back", "off"])
def test_uploads_that_the_store_does_not_verify_are_a_warning(verification: str) -> None:
    assert by_check(replace(SOUND, verification=verification))["verification"].severity is Severity.WARNING


@pytest.mark.parametrize("operation", Operation)
def test_an_operation_that_failed_for_another_reason_is_no_matter_of_permissions(operation: Operation) -> None:
    finding = by_check(replace(SOUND, tried=(Tried(operation, "NotImplemented"),)))[f"permission:{operation.value}"]
    assert finding.severity is (Severity.FAILURE if NEEDS[operation].is_vital else Severity.WARNING)
    assert (finding.text, NEEDS[operation].permission in str(finding.next_step)) == (
        f"NotImplemented: {NEEDS[operation].lost}",
        False,
    )


@given(facts)
def test_every_finding_that_is_not_ok_has_a_next_step_and_no_check_comes_twice(found: StoreFacts) -> None:
    findings = list(store_findings(found))
    assert all((finding.next_step is None) is (finding.severity is Severity.OK) for finding in findings)
    assert len({finding.check for finding in findings}) == len(findings)


@given(tried)
def test_a_denied_operation_fails_exactly_where_no_run_works_without_it_and_names_its_permission(
    given_tries: tuple[Tried, ...],
) -> None:
    found = by_check(replace(SOUND, tried=given_tries))
    for each in given_tries:
        finding, need = found[f"permission:{each.operation.value}"], NEEDS[each.operation]
        if each.error is None:
            assert finding.severity is Severity.OK
            continue
        assert finding.severity is (Severity.FAILURE if need.is_vital else Severity.WARNING)
        assert need.permission in str(finding.next_step)
        assert need.lost in finding.text


@given(st.integers(0, len(Operation) - 1))
def test_operations_that_were_not_tried_are_named(count: int) -> None:
    text = by_check(replace(SOUND, tried=SOUND.tried[:count]))["permission"].text
    assert [operation.value in text for operation in Operation] == [False] * count + [True] * (len(Operation) - count)


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_clock_further_off_is_never_judged_better_and_its_direction_is_named(one_s: float, other_s: float) -> None:
    order = [Severity.OK, Severity.WARNING, Severity.FAILURE]
    near, far = (by_check(replace(SOUND, skew_s=skew_s))["clock"] for skew_s in sorted((one_s, other_s)))
    assert order.index(near.severity) <= order.index(far.severity)
    if far.severity is not Severity.OK:
        assert "ahead of" in far.text
        assert "behind" in by_check(replace(SOUND, skew_s=-max(one_s, other_s)))["clock"].text


@pytest.mark.parametrize(
    ("trouble", "code"), [(Trouble.REACH, 6), (Trouble.INTEGRITY, 8), (Trouble.TLS, 2), (Trouble.BUCKET, 2)]
)
def test_trouble_with_the_whole_store_is_the_only_finding(trouble: Trouble, code: int) -> None:
    [finding] = store_findings(replace(SOUND, trouble=(trouble, "why")))
    assert (finding.check, finding.text, exit_code_of([finding])) == (trouble.value, "why", code)


@given(st.one_of(st.none(), st.text()))
def test_any_code_is_about_something(code: str | None) -> None:
    assert trouble_of_code(code) in Trouble


def test_codes_of_credentials_bucket_and_clock_are_told_apart() -> None:
    told = [trouble_of_code(code) for code in ("InvalidAccessKeyId", "NoSuchBucket", "RequestTimeTooSkewed", "Teapot")]
    assert told == [Trouble.CREDENTIALS, Trouble.BUCKET, Trouble.CLOCK, Trouble.ACCESS]
