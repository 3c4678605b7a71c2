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
    ends_with_container=st.booleans(),
    left_behind=st.lists(st.text(min_size=1), max_size=2).map(tuple),
)


def by_check(found: StoreFacts) -> dict[str, Finding]:
    return {finding.check: finding for finding in store_findings(found)}


def test_a_sound_store_has_nothing_to_mend() -> None:
    assert {finding.severity for finding in store_findings(SOUND)} == {Severity.OK}


PERMISSIONS = {
    Operation.LIST: ("s3:ListBucket", "no resume finds a checkpoint, and the sidecar does not start", True),
    Operation.DELETE: (
        "s3:DeleteObject",
        "the sidecar does not start; a step that is written again cannot be revoked, and CKPT_KEEP_STORE deletes nothing",
        True,
    ),
    Operation.PUT: ("s3:PutObject", "nothing can be uploaded", True),
    Operation.GET: ("s3:GetObject", "no resume can read a checkpoint, and commits cannot be verified", True),
    Operation.LIST_PARTS: (
        "s3:ListMultipartUploadParts",
        "unfinished uploads of killed pods cannot be judged, so they stay and cost storage",
        False,
    ),
    Operation.LIST_UPLOADS: (
        "s3:ListBucketMultipartUploads",
        "unfinished uploads of killed pods are not found, so they stay and cost storage",
        False,
    ),
    Operation.ABORT: (
        "s3:AbortMultipartUpload",
        "unfinished uploads cannot be aborted, so they stay and cost storage",
        False,
    ),
    Operation.COPY: (
        "s3:GetObject and s3:PutObject",
        "unchanged files are not copied in the store: they are sent again",
        False,
    ),
    **dict.fromkeys(
        [Operation.BEGIN, Operation.PART, Operation.COMPLETE],
        ("s3:PutObject", "files larger than a part cannot be uploaded", True),
    ),
}


@pytest.mark.parametrize("operation", Operation)
def test_a_denied_operation_names_what_is_lost_and_the_permission_of_s3(operation: Operation) -> None:
    permission, lost, is_vital = PERMISSIONS[operation]
    finding = by_check(replace(SOUND, tried=(Tried(operation, "no", is_denied=True),)))[f"permission:{operation.value}"]
    assert finding == Finding(
        f"permission:{operation.value}",
        Severity.FAILURE if is_vital else Severity.WARNING,
        f"denied: {lost}",
        f"grant {permission} on bucket and prefix (s3://bucket/run)",
        exit_code=2 if is_vital else 0,
    )


def test_a_store_that_is_deleted_with_its_container_is_a_failure() -> None:
    found = by_check(replace(SOUND, ends_with_container=True))["lasting"]
    assert (found.severity, found.exit_code) == (Severity.FAILURE, 2)


TEXTS: list[tuple[dict[str, object], str, str, str | None]] = [
    ({}, "access", "s3://bucket/run: reached, and access is allowed", None),
    ({}, "permission:PutObject", "allowed", None),
    ({}, "tls", "https, and the certificate is trusted", None),
    (
        {"is_encrypted": False},
        "tls",
        "the store is reached by http: who is on the way can read checkpoints",
        "set AWS_S3_ENDPOINT to https://…, unless that network is trusted",
    ),
    (
        {"verifies_tls": False},
        "tls",
        "the store's certificate is not verified (CKPT_VERIFY_TLS=false)",
        "name its authority in CKPT_CA_BUNDLE and remove CKPT_VERIFY_TLS",
    ),
    (
        {"tried": (Tried(Operation.PUT, "NotImplemented"),)},
        "permission:PutObject",
        "NotImplemented: nothing can be uploaded",
        "see the log of the store, or ask its operator for this operation",
    ),
    (
        {"tried": tuple(map(Tried, list(Operation)[:-2]))},
        "permission",
        "not tried, because of what failed before: AbortMultipartUpload, CopyObject",
        "correct that, then run doctor again",
    ),
    ({}, "verification", "the store verifies the CRC64NVME of each object", None),
    ({"verification": "signed-sha256"}, "verification", "the store verifies the SHA-256 of each request", None),
    ({"verification": "md5"}, "verification", "the store's etags are MD5s, which the sidecar compares", None),
    ({"verification": "fsync"}, "verification", "a file system: write and fsync are confirmed", None),
    (
        {"verification": "read-back"},
        "verification",
        "uploads are read back to be verified: each costs its bytes twice",
        "allow for it in the grace period; a store that verifies checksums needs no reading back",
    ),
    ({"verification": "off"}, "verification", "uploads are not verified (CKPT_VERIFY=off)", "unset CKPT_VERIFY"),
    ({}, "conditional-put", "the store refuses a conditional write over an existing object", None),
    (
        {"conditional_put": False},
        "conditional-put",
        "the store ignores conditional writes: two pods that claim a prefix in the same instant are told apart later",
        "use a store with If-None-Match, or make sure that one pod at a time uses a prefix",
    ),
    ({"skew_s": 29.9}, "clock", "this machine's clock agrees with the store's", None),
    (
        {"skew_s": 30.0},
        "clock",
        "this machine's clock is 30 s ahead of the store's: S3 refuses requests from 15 min on",
        "set this machine's clock by NTP",
    ),
    (
        {"skew_s": -900.0},
        "clock",
        "this machine's clock is 900 s behind the store's: S3 refuses requests",
        "set this machine's clock by NTP",
    ),
    ({}, "round-trip", "10.0 ms", None),
    ({}, "upload-rate", "100 MB/s", None),
    ({}, "download-rate", "200 MB/s", None),
    ({"rate_error": "reset"}, "rate", "not measured: reset", "correct that, then run doctor again"),
    (
        {"rate_error": "too large", "is_rate_refused": True},
        "rate",
        "too large",
        "correct that: larger files do not reach the store",
    ),
    (
        {"ends_with_container": True},
        "lasting",
        "the folder is on this container's own file system, which is deleted with the container",
        "mount a volume that lasts there, such as a PVC, or correct CKPT_STORE",
    ),
    (
        {"left_behind": ("a", "b")},
        "left-behind",
        "could not be deleted: a, b",
        "grant s3:DeleteObject; the next start deletes them",
    ),
]


@pytest.mark.parametrize(("changed", "check", "text", "next_step"), TEXTS)
def test_what_was_found_is_said_with_the_next_step(
    changed: dict[str, object], check: str, text: str, next_step: str | None
) -> None:
    finding = by_check(replace(SOUND, **changed))[check]  # type: ignore[arg-type]
    assert (finding.text, finding.next_step) == (text, next_step)


def test_what_was_not_measured_is_not_mentioned() -> None:
    checks = [finding.check for finding in store_findings(StoreFacts("s3://bucket/run", tried=SOUND.tried))]
    assert [check for check in checks if not check.startswith("permission:")] == ["access"]


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


@pytest.mark.parametrize(
    ("trouble", "codes"),
    [
        (
            Trouble.BUCKET,
            [
                "NoSuchBucket",
                "InvalidBucketName",
                "PermanentRedirect",
                "AuthorizationHeaderMalformed",
                "IllegalLocationConstraintException",
            ],
        ),
        (
            Trouble.CREDENTIALS,
            [
                "InvalidAccessKeyId",
                "SignatureDoesNotMatch",
                "InvalidToken",
                "InvalidClientTokenId",
                "ExpiredToken",
                "ExpiredTokenException",
            ],
        ),
        (Trouble.CLOCK, ["RequestTimeTooSkewed"]),
        (Trouble.ACCESS, ["Teapot", "", None]),
    ],
)
def test_codes_of_credentials_bucket_and_clock_are_told_apart(trouble: Trouble, codes: list[str | None]) -> None:
    assert {trouble_of_code(code) for code in codes} == {trouble}


@pytest.mark.parametrize(
    ("trouble", "next_step"),
    [
        (Trouble.REACH, "check AWS_S3_ENDPOINT, DNS, network policies and the proxy from this pod, then run doctor again"),
        (
            Trouble.TLS,
            "name the authority of the store's certificate in CKPT_CA_BUNDLE, or correct https or http in AWS_S3_ENDPOINT",
        ),
        (
            Trouble.CREDENTIALS,
            "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the mounted secret (CKPT_CREDENTIALS_DIR) or the pod's role",
        ),
        (Trouble.BUCKET, "create the bucket, or correct CKPT_STORE, AWS_S3_ENDPOINT or AWS_DEFAULT_REGION"),
        (Trouble.CLOCK, "set this machine's clock by NTP"),
        (Trouble.ACCESS, "correct CKPT_STORE and the AWS_ settings by the store's answer"),
        (Trouble.INTEGRITY, "look at the network path (proxies, caches) and at the store's own log"),
    ],
)
def test_trouble_with_the_whole_store_has_its_next_step(trouble: Trouble, next_step: str) -> None:
    [finding] = store_findings(replace(SOUND, trouble=(trouble, "why")))
    assert finding.next_step == next_step


@pytest.mark.parametrize(
    ("error", "next_step"),
    [
        ("[Errno 28] No space left on device", "free space on the volume of the store, or enlarge it, then run doctor again"),
        ("[Errno 122] Disk quota exceeded", "free space on the volume of the store, or enlarge it, then run doctor again"),
        (
            "Permission denied",
            "mount the volume of the store, or create its folder, writable for this user, then run doctor again",
        ),
    ],
)
@pytest.mark.parametrize("trouble", Trouble)
def test_trouble_with_a_folder_has_the_next_step_of_a_volume(trouble: Trouble, error: str, next_step: str) -> None:
    [finding] = store_findings(replace(SOUND, url="file:///store/run", trouble=(trouble, error)))
    assert finding.next_step == next_step


def test_where_everything_is_denied_the_requester_may_have_to_pay() -> None:
    denied = tuple(Tried(operation, "no", is_denied=True) for operation in (Operation.LIST, Operation.DELETE))
    found = by_check(replace(SOUND, tried=denied))
    assert "CKPT_S3_REQUEST_PAYER=requester" in (found["permission:ListObjectsV2"].next_step or "")
    found = by_check(replace(SOUND, tried=(*denied, Tried(Operation.PUT))))
    assert "CKPT_S3_REQUEST_PAYER" not in (found["permission:ListObjectsV2"].next_step or "")
