from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planning.findings import Finding, Severity, ok, warning
from sidecar.core.planning.grace_diagnosis import grace_findings

seconds = st.floats(1, 3600)
rates = st.floats(1e5, 1e10)


@given(seconds, rates, st.integers(1, 10**13), st.floats(0, 100))
def test_the_recommended_grace_period_is_one_that_fits(grace_s: float, rate: float, size_bytes: int, save_s: float) -> None:
    given_all = {"up_bytes_per_s": rate, "checkpoint_bytes": size_bytes, "save_s": save_s}
    [finding] = grace_findings(grace_s=grace_s, **given_all)
    if finding.severity is Severity.OK:
        return
    recommended_s = float(str(finding.next_step).split("CKPT_GRACE_SECONDS to ")[1].split()[0])
    assert recommended_s > grace_s
    [again] = grace_findings(grace_s=recommended_s, **given_all)
    assert again.severity is Severity.OK


@pytest.mark.parametrize(
    ("grace_s", "checkpoint_bytes", "save_s", "finding"),
    [
        (
            30.0,
            None,
            None,
            ok("grace", "2.85 GB fit into 30 s at 100 MB/s, less the time to write them; --size and --save say more"),
        ),
        (
            30.0,
            None,
            8.5,
            ok("grace", "2 GB fit into 30 s at 100 MB/s, less the time to write them; --size and --save say more"),
        ),
        (
            1.0,
            None,
            8.5,
            ok("grace", "0 B fit into 1 s at 100 MB/s, less the time to write them; --size and --save say more"),
        ),
        (
            30.0,
            2 * 10**9,
            None,
            ok("grace", "a checkpoint of 2 GB is durable 20 s after SIGTERM at 100 MB/s; the grace period is 30 s"),
        ),
        (
            30.0,
            2 * 10**9,
            12.0,
            warning(
                "grace",
                "a checkpoint of 2 GB is durable 32 s after SIGTERM at 100 MB/s, and the grace period is 30 s: "
                "a just-in-time save would be lost",
                "set terminationGracePeriodSeconds and CKPT_GRACE_SECONDS to 42 (inject --grace 42), or save more often",
            ),
        ),
    ],
)
def test_whether_a_save_fits_is_said_in_numbers(
    grace_s: float, checkpoint_bytes: int | None, save_s: float | None, finding: Finding
) -> None:
    assert list(grace_findings(grace_s=grace_s, up_bytes_per_s=1e8, checkpoint_bytes=checkpoint_bytes, save_s=save_s)) == [
        finding
    ]


@given(seconds, rates)
def test_without_a_size_it_says_what_fits_and_without_a_rate_nothing(grace_s: float, rate: float) -> None:
    [finding] = grace_findings(grace_s=grace_s, up_bytes_per_s=rate, checkpoint_bytes=None, save_s=None)
    assert finding.severity is Severity.OK
    assert list(grace_findings(grace_s=grace_s, up_bytes_per_s=None, checkpoint_bytes=1, save_s=None)) == []
