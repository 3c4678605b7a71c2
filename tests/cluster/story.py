"""A training that is interrupted: what it did step by step, whatever became of its pods."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import SIDECAR, Life, Namespace, Object, until
from tests.cluster.workloads import Workloads

TRAINER = "trainer"
_STEP = re.compile(r"^step (\d+)\b")


@dataclass
class Story:
    """One run in one namespace."""

    namespace: Namespace
    workloads: Workloads
    bucket: Any
    name: str = "run"
    trainer: str = TRAINER
    kind: str = "job"

    def start(self, *documents: Object, options: tuple[str, ...] = ("--grace", "60"), store: str = "") -> None:
        self.namespace.kubectl("apply", "-f", "-", given=self.workloads.injected(*documents, options=options, store=store))

    # --- the trainer

    def lives(self) -> list[Life]:
        """Return the lives of the trainer that did anything, in the order of their start."""
        return [life for life in self.namespace.watch.of(self.trainer) if life.lines]

    def at_step(self, step: int, *, life: int = 0, timeout_s: float = 90) -> Life:
        """Wait until a life has done a step, and return it."""

        def found() -> Life | None:
            lives = self.lives()
            return lives[life] if len(lives) > life and any(done >= step for done in steps(lives[life])) else None

        result = until(found, what=lambda: f"step {step} of life {life}\n{self.namespace.watch.report()}", timeout_s=timeout_s)
        assert result is not None
        return result

    def said(self, text: str, *, timeout_s: float = 90) -> Life:
        """Wait until any life of the trainer has said something."""
        found = until(
            lambda: [life for life in self.lives() if life.has(text)],
            what=lambda: f"the trainer says {text!r}\n{self.namespace.watch.report()}",
            timeout_s=timeout_s,
        )
        return found[-1]

    def weights(self, *, timeout_s: float = 120) -> str:
        """Wait for the end, and return the digest of the weights."""

        def found() -> list[str]:
            said = [line for life in self.lives() for line in list(life.lines) if line.startswith("weights ")]
            assert said or "Failed" not in self.namespace.condition(self.kind, self.name), self.namespace.watch.report()
            return said

        report = self.namespace.watch.report
        return until(found, what=lambda: f"the end\n{report()}", timeout_s=timeout_s, every_s=3)[-1].split()[-1]

    def completed(self, *, timeout_s: float = 60, condition: str = "") -> None:
        wanted = condition or {"jobset": "Completed"}.get(self.kind, "Complete")
        until(
            lambda: wanted in self.namespace.condition(self.kind, self.name),
            what=lambda: f"{self.kind} {wanted}\n{self.namespace.watch.report()}",
            timeout_s=timeout_s,
            every_s=2,
        )

    # --- the sidecar

    def sidecars(self) -> list[Life]:
        return [life for life in self.namespace.watch.of(SIDECAR) if life.lines]

    def event(self, event: str, *, timeout_s: float = 60) -> Object:
        """Wait for an event of any sidecar, and return the latest."""
        found = until(
            lambda: [fact for life in self.sidecars() for fact in life.events(event)],
            what=lambda: f"{event}\n{self.namespace.watch.report()}",
            timeout_s=timeout_s,
        )
        return found[-1]

    def committed(self) -> list[int]:
        """Return the durable steps, as the store has them."""
        suffix = re.compile(rf"^{self.namespace.name}/{self.name}/checkpoint-(\d+)/\.complete$")
        keys = (found.key for found in self.bucket.objects.filter(Prefix=f"{self.namespace.name}/{self.name}/"))
        return sorted(int(match[1]) for key in keys if (match := suffix.match(key)))

    def durable(self, step: int, *, timeout_s: float = 60) -> None:
        until(
            lambda: any(done >= step for done in self.committed()),
            what=lambda: f"step {step} durable, not only {self.committed()}\n{self.namespace.watch.report()}",
            timeout_s=timeout_s,
        )

    # --- pods

    def pod(self, *, other_than: str = "", timeout_s: float = 60) -> Object:
        """Wait for a pod that is not terminating, and return it."""
        found = until(
            lambda: [pod for pod in self.namespace.living() if pod["metadata"]["name"] != other_than],
            what=lambda: f"a pod\n{self.namespace.watch.report()}",
            timeout_s=timeout_s,
        )
        return found[-1]


def steps(life: Life) -> list[int]:
    """Return the steps that a life did, in their order."""
    return [int(match[1]) for line in list(life.lines) if (match := _STEP.match(line))]


def assert_no_step_was_lost(before: Life, after: Life) -> None:
    """The next life went on where the one before it ended."""
    assert steps(after)[0] == steps(before)[-1] + 1, (
        f"{before.pod} ended with {steps(before)[-1]}, {after.pod}: {after.lines[:5]}"
    )


def assert_two_train_jobs_are_two_runs(story: Story, workloads: Workloads, *, steps: int) -> None:
    """Two TrainJobs of one runtime, whose pods are deleted, both end with the weights of an undisturbed run."""
    names = ("one", "two")
    story.namespace.apply(*map(workloads.train_job, names))
    runs = [Story(story.namespace, workloads, story.bucket, name=name, trainer="node", kind="trainjob") for name in names]
    lives = until(lambda: found if len(found := runs[0].lives()) == 2 else [], what=story.namespace.watch.report)
    for life in lives:
        until(lambda life=life: life.has("step 20"), what="step 20")  # type: ignore[misc]
        story.namespace.delete_pod(life.pod)
    for run in runs:
        run.completed(timeout_s=120)
        assert run.committed()[-1] == steps
    ends = [line for life in runs[0].lives() for line in life.lines if line.startswith("weights ")]
    assert len(ends) >= len(names)  # one more for each that had ended when its pod was deleted
    assert set(ends) == {f"weights {weights_after(steps)}"}
