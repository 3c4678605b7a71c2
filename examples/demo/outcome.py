"""What a demo shows, measured from the outside, and the judgement over it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from examples.demo.pod import SidecarLog, at_s

PREEMPTED = 143
DIGEST = "weights sha256 "
"""How the line begins with which the training script ends."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo shows. Seconds are wall time."""

    ok: bool
    steps_lost: int
    bit_identical: bool
    jit_step: int
    resumed_step: int
    save_s: float
    """SIGTERM until the trainer had finished its just-in-time checkpoint."""
    sigterm_to_durable_s: float
    resume_s: float
    """The new pod's sidecar being asked, until the checkpoint was verified on the volume."""
    objects: int
    final_durable: bool
    trainer_exit_codes: tuple[int, int]
    sidecar_exit_codes: tuple[int, int]


def judge(
    first: SidecarLog,
    second: SidecarLog,
    *,
    told_s: float,
    last_step: int,
    digests: tuple[str, str],
    keys: Collection[str],
    trainer_exit_codes: tuple[int, int],
    sidecar_exit_codes: tuple[int, int],
) -> Outcome:
    """Compare two pods, the preempted one and the one that resumed, with a run that was never interrupted.

    Args:
        first: What the sidecar of the preempted pod logged.
        second: What that of the resuming pod logged.
        told_s: When SIGTERM was sent, in epoch seconds.
        last_step: The last step that the preempted trainer made.
        digests: Of the final weights: uninterrupted, resumed.
        keys: All objects in the store, relative to the run's prefix.
        trainer_exit_codes: Of both pods.
        sidecar_exit_codes: Of both pods.

    Raises:
        ValueError: The trainer left no just-in-time checkpoint.
        TimeoutError: It is not durable, or nothing was resumed.
    """
    saved = first.find("checkpoint_finished", save_reason="jit")
    if saved is None:
        raise ValueError("the trainer left no just-in-time checkpoint; its output is above")
    durable = first.wait_for("checkpoint_committed", timeout_s=0, step=saved["step"])
    resumed = second.wait_for("resume_ready", timeout_s=0)
    steps_lost, final = last_step - int(resumed["step"]), "final/.complete" in keys
    exits = trainer_exit_codes, sidecar_exit_codes
    return Outcome(
        ok=steps_lost == 0 and digests[0] == digests[1] and final and exits == ((PREEMPTED, 0), (0, 0)),
        steps_lost=steps_lost,
        bit_identical=digests[0] == digests[1],
        jit_step=int(saved["step"]),
        resumed_step=int(resumed["step"]),
        save_s=round(at_s(saved) - told_s, 3),
        sigterm_to_durable_s=round(at_s(durable) - told_s, 3),
        resume_s=float(resumed["took_s"]),
        objects=len(keys),
        final_durable=final,
        trainer_exit_codes=trainer_exit_codes,
        sidecar_exit_codes=sidecar_exit_codes,
    )


def digest_in(lines: Sequence[str]) -> str:
    """Return the digest that the training script printed at its end.

    Raises:
        ValueError: It printed none; the text has its last lines.
    """
    for line in reversed(lines):
        if line.startswith(DIGEST):
            return line.removeprefix(DIGEST).strip()
    tail = "\n".join(lines[-15:])
    raise ValueError(f"the training script did not print '{DIGEST}…'; it ended with:\n{tail}\n")


def show(outcome: Outcome, *, as_json: bool) -> None:
    """Print the table, the judgement and, if asked for, the same as one line of JSON."""
    print(f"\n{_table(outcome)}\n")
    print("ok" if outcome.ok else "NOT OK", flush=True)
    if as_json:
        print(json.dumps(asdict(outcome)), flush=True)


def _table(outcome: Outcome) -> str:
    rows = [
        ["WHAT", "MEASURED"],
        ["steps lost", str(outcome.steps_lost)],
        ["just-in-time checkpoint at step", str(outcome.jit_step)],
        ["resumed at step", str(outcome.resumed_step)],
        ["SIGTERM until saved", f"{outcome.save_s:.2f} s"],
        ["SIGTERM until durable", f"{outcome.sigterm_to_durable_s:.2f} s"],
        ["resume (choose, download, verify)", f"{outcome.resume_s:.2f} s"],
        ["final/ durable", "yes" if outcome.final_durable else "NO"],
        ["objects in the store", str(outcome.objects)],
        ["exit codes of the trainers, of the sidecars", f"{outcome.trainer_exit_codes}, {outcome.sidecar_exit_codes}"],
        ["final weights bit-identical to the uninterrupted run", "yes" if outcome.bit_identical else "NO"],
    ]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:<{width}}  {measured}" for what, measured in rows)
