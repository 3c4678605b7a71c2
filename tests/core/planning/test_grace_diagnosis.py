from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planning.findings import Severity
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


@given(seconds, rates)
def test_without_a_size_it_says_what_fits_and_without_a_rate_nothing(grace_s: float, rate: float) -> None:
    [finding] = grace_findings(grace_s=grace_s, up_bytes_per_s=rate, checkpoint_bytes=None, save_s=None)
    assert finding.severity is Severity.OK
    assert list(grace_findings(grace_s=grace_s, up_bytes_per_s=None, checkpoint_bytes=1, save_s=None)) == []
