from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planning.findings import Finding, Severity, exit_code_of, failure, ok, warning

CODES = (2, 6, 8)
findings = st.lists(
    st.one_of(
        st.just(ok("a", "fine")),
        st.just(warning("b", "slow", "do it")),
        st.sampled_from(CODES).map(lambda code: failure("c", "broken", "mend it", exit_code=code)),
    )
)


@given(findings, st.booleans())
def test_the_code_is_0_exactly_if_nothing_failed(found: list[Finding], strict: bool) -> None:
    bad = {Severity.FAILURE, *([Severity.WARNING] if strict else [])}
    assert (exit_code_of(found, strict=strict) == 0) is not any(finding.severity in bad for finding in found)


@given(findings)
def test_a_store_out_of_reach_goes_before_all_other_failures_and_order_does_not_matter(found: list[Finding]) -> None:
    codes = {finding.exit_code for finding in found if finding.severity is Severity.FAILURE}
    wanted = 6 if 6 in codes else 8 if 8 in codes else 2 if codes else 0
    assert exit_code_of(found) == exit_code_of(reversed(found)) == wanted
