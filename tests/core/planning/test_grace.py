from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.phases import margin_s
from sidecar.core.lifecycle.risk import recommended_grace_s, risk
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.planning.grace import Grace, plan_grace

saves = st.builds(
    SaveProfile,
    st.integers(1, 10**15),
    took_s=st.floats(0, 1e4),
    step_seconds=st.floats(0, 1e3),
    ranks=st.integers(1, 1024),
)


def test_known_values() -> None:
    needed = plan_grace(save=SaveProfile(48 * 10**9, took_s=12.0, step_seconds=1.0, ranks=8), bytes_per_s=1e9, grace_s=30.0)
    assert (needed.save_s, needed.upload_s, needed.durable_s, needed.fits) == (14.0, 48.0, 62.0, False)
    assert needed.recommended_s == 80  # 1.25 x 62 = 77.5, and 2 s of margin, rounded up
    assert needed.margin_s == 2.0
    nothing = plan_grace(save=SaveProfile(0, took_s=None, step_seconds=None, ranks=1), bytes_per_s=1e9, grace_s=30.0)
    assert nothing == Grace(save_s=0.0, upload_s=0.0, durable_s=0.0, fits=True, recommended_s=1, margin_s=0.5)


@given(saves, st.floats(1, 1e12), st.floats(0.1, 1e6))
def test_what_is_recommended_fits_and_never_falls_below_need(save: SaveProfile, bytes_per_s: float, grace_s: float) -> None:
    needed = plan_grace(save=save, bytes_per_s=bytes_per_s, grace_s=grace_s)
    assert needed.recommended_s == recommended_grace_s(needed.durable_s)
    assert needed.recommended_s - margin_s(needed.recommended_s) >= needed.durable_s
    assert plan_grace(save=save, bytes_per_s=bytes_per_s, grace_s=needed.recommended_s).fits
    assert needed.fits == (needed.durable_s <= grace_s - margin_s(grace_s))


@given(saves, st.floats(1, 1e12))
def test_the_advice_of_the_running_sidecar_names_the_same_seconds(save: SaveProfile, bytes_per_s: float) -> None:
    now = risk(
        seconds_at_risk=None,
        durable_step=None,
        trainer_step=None,
        usual=save,
        bytes_per_s=bytes_per_s,
        grace_s=0.1,
    )
    needed = plan_grace(save=save, bytes_per_s=bytes_per_s, grace_s=0.1)
    assert now.advice is not None
    assert f"CKPT_GRACE_SECONDS to {needed.recommended_s};" in now.advice
