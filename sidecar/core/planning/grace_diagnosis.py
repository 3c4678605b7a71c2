"""Whether a checkpoint fits into the grace period at a measured rate."""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.core.format.readable import rate_text, seconds_text, size_text
from sidecar.core.lifecycle.phases import margin_s
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.planning.findings import Finding, ok, warning
from sidecar.core.planning.grace import plan_grace


def grace_findings(
    *, grace_s: float, up_bytes_per_s: float | None, checkpoint_bytes: int | None, save_s: float | None
) -> Iterator[Finding]:
    """Yield the finding about the grace period.

    Args:
        grace_s: ``CKPT_GRACE_SECONDS``.
        up_bytes_per_s: Measured rate to the store; ``None``: there is none, and so no finding.
        checkpoint_bytes: Size of one checkpoint; ``None``: unknown.
        save_s: Seconds that the trainer writes it; ``None``: unknown, and counted as none.
    """
    if not up_bytes_per_s:
        return
    at = f"at {rate_text(up_bytes_per_s)}"
    if checkpoint_bytes is None:
        fits = size_text(max(0.0, grace_s - margin_s(grace_s) - (save_s or 0.0)) * up_bytes_per_s)
        yield ok("grace", f"{fits} fit into {grace_s:g} s {at}, less the time to write them; --size and --save say more")
        return
    profile = SaveProfile(checkpoint_bytes, took_s=save_s or 0.0, step_seconds=None, ranks=1)
    planned = plan_grace(save=profile, bytes_per_s=up_bytes_per_s, grace_s=grace_s)
    text = f"a checkpoint of {size_text(checkpoint_bytes)} is durable {seconds_text(planned.durable_s)} after SIGTERM {at}"
    if planned.fits:
        yield ok("grace", f"{text}; the grace period is {grace_s:g} s")
    else:
        seconds = planned.recommended_s
        both = f"terminationGracePeriodSeconds and CKPT_GRACE_SECONDS to {seconds}"
        step = f"set {both} (inject --grace {seconds}), or save more often"
        yield warning("grace", f"{text}, and the grace period is {grace_s:g} s: a just-in-time save would be lost", step)
