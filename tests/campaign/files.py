"""A run of a single node with a trainer of files: its lives, the end without faults, and a resume on a new volume."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Sequence

from tests.campaign import volume as volumes
from tests.campaign.plan import Life, Save
from tests.campaign.pods import EXIT_FENCED, EXIT_GIVEN_UP, EXIT_OK, SLACK_S, Pod
from tests.campaign.reader import step_of
from tests.campaign.run import HEALED_S, Run, ends, patience

LAST_SAVE = Save(0.1, (70_000, 3_000), "full")
UP_S = 15.0
FENCED_S = 12.0
"""The claims are checked every 10 s."""
JUMPS_S = (-86_400.0, -3_000.0, -200.0, 200.0, 3_000.0, 86_400.0 * 40)


class Director:
    """Plays a story."""

    def __init__(self, run: Run, stack: contextlib.ExitStack) -> None:
        self._run, self._stack = run, stack
        self._pods: list[Pod] = []
        self._earlier: list[tuple[Pod, float]] = []
        """Pods that were replaced while they lived, and since when the new one holds the prefix."""
        self._clock = volumes.Clock(run.folder / "clock")

    def play(self) -> None:
        pod = self._new_pod()
        lives = self._run.story.lives
        for number, life in enumerate(lives):
            self._run.note(f"life {number}: {life.ending}; {life.act or 'no act'}; {[str(t.kind) for t in life.troubles]}")
            self._live(pod, life)
            if number < len(lives) - 1 or life.act == "volume read-only":
                pod = self._end(pod, life)
        self._settle(pod)
        self._run.check_store()
        self._resume_anew()

    def _new_pod(self) -> Pod:
        number = len(self._pods)
        place = self._run.folder / f"pod-{number}"
        place.mkdir()
        volume = self._stack.enter_context(volumes.mounted(place, self._run.story.volume))
        pod = Pod(self._run, f"pod-{number}", volume)
        self._stack.callback(pod.close)
        self._pods.append(pod)
        return pod

    def _live(self, pod: Pod, life: Life) -> None:
        if self._run.proxy is not None and life.from_the_start:
            self._run.proxy.begin(life.troubles)
        within: Sequence[str] = ()
        if life.act == "clock jumps":
            within = self._clock.within
        elif life.act == "no inotify":
            within = volumes.NO_INOTIFY
            self._run.faults[life.act] += 1
        if not pod.lives:
            pod.start(within)
        if pod.trainer is None or not pod.trainer.is_alive():
            pod.train()
        assert pod.trainer
        if not life.from_the_start:
            pod.until_up(within_s=UP_S)
            if self._run.proxy is not None:
                self._run.proxy.begin(life.troubles)
        pod.trainer.give(*life.saves)
        began_s = time.monotonic()
        time.sleep(life.act_at_s if life.act else 0.0)
        self._act(pod, life)
        time.sleep(max(0.0, began_s + life.ends_after_s - time.monotonic()))
        pod.check_alive()

    def _act(self, pod: Pod, life: Life) -> None:
        if life.act in ("", "no inotify"):
            return
        self._run.faults[life.act] += 1
        self._run.note(f"{life.act} for {life.act_s:.1f} s")
        if life.act == "stopped for a while":
            pod.stop(life.act_s)
        elif life.act == "clock jumps" and pod.lives:
            self._clock.turn(random.Random(self._run.story.seed).choice(JUMPS_S))
            time.sleep(life.act_s)
            self._clock.turn(0.0)
        elif life.act == "volume full":
            with volumes.full(pod.volume):
                time.sleep(life.act_s)
        elif life.act == "volume hangs":
            with volumes.frozen(pod.volume):
                time.sleep(life.act_s)
        elif life.act == "volume read-only":
            pod.until_up(within_s=UP_S)  # a sidecar refuses to start on such a volume
            volumes.becomes_read_only(pod.volume)
            time.sleep(life.act_s)

    def _end(self, pod: Pod, life: Life) -> Pod:
        """End a life as its story says. Returns the pod of the next one."""
        ending = "SIGTERM" if life.act == "volume read-only" else life.ending
        self._run.faults[ending] += 1
        if ending == "kill -9, trainer goes on":
            pod.kill()
            return pod
        if ending == "replaced while it lives":
            return self._replace(pod)
        if ending == "SIGTERM, trainer goes on":
            pod.terminate(with_trainer=True)
            if pod.trainer is not None and pod.trainer.is_alive() and not pod.trainer.was_told:
                return pod
            pod.stop_training()
            return self._new_pod()
        if ending == "kill -9":
            pod.kill()
            pod.stop_training()
            return pod
        pod.stop_training()
        pod.kill() if ending == "pod lost" else pod.terminate()
        return self._new_pod()

    def _replace(self, earlier: Pod) -> Pod:
        later = self._new_pod()
        if not earlier.holds_prefix(within_s=6.0):  # it could not claim it yet: of the two it would be the later one
            earlier.kill()
            earlier.stop_training()
            return later
        later.start()
        since_s = time.monotonic() if later.holds_prefix(within_s=20.0) else math.inf
        self._earlier.append((earlier, since_s))
        self._run.faults["replaced, and lived on"] += 1
        if earlier.trainer is not None:
            earlier.trainer.give(Save(0.2, (40_000,), "full"), Save(1.0, (40_000,), "full"))
        return later

    def _settle(self, pod: Pod) -> None:
        """Without any more faults the newest becomes durable, and the end is in order."""
        self._run.heal()
        healed_s = time.monotonic()
        self._end_earlier()
        if not pod.lives:
            pod.start()
        if pod.trainer is None or not pod.trainer.is_alive():
            pod.stop_training()
            pod.train()
        trainer = pod.trainer
        assert trainer is not None
        self._until_idle(pod, within_s=120.0)
        if trainer.newest is None or random.Random(self._run.story.seed).random() < 0.3:
            trainer.give(LAST_SAVE)
            self._until_idle(pod, within_s=60.0)
        pod.check_alive()
        if self._run.story.ends == "waits":
            self._until_durable(pod, healed_s)
        pod.stop_training()
        if self._run.story.ends == "waits" and not pod.flushed(within_s=HEALED_S) and not pod.torn:
            self._run.violation(f"{pod.uid}: not everything is durable without faults: {pod.answers('/v1/status')}")
        code = pod.terminate()
        if code == EXIT_GIVEN_UP and self._run.story.ends == "at once":
            self._run.figures["given up in a flush without faults"] += 1
            pod.start()
            self._until_durable(pod, healed_s)
            pod.flushed(within_s=HEALED_S)
            code = pod.terminate()
        if code not in (EXIT_OK, None) and not (code == EXIT_GIVEN_UP and pod.gave_up_what_the_trainer_took()):
            self._run.violation(f"{pod.uid}: exit code {code} on a healthy store: {pod.sidecar.log()[-2500:]}")

    def _until_idle(self, pod: Pod, *, within_s: float) -> None:
        assert pod.trainer
        began_s = time.monotonic()
        while not pod.trainer.idle():
            if time.monotonic() - began_s > patience(within_s):
                self._run.violation(f"{pod.uid}: the trainer is not through after {within_s} s: {pod.sidecar.log()[-1500:]}")
                return
            time.sleep(0.05)

    def _until_durable(self, pod: Pod, healed_s: float) -> None:
        newest = pod.newest
        while newest is not None and not self._run.is_committed(newest):
            if time.monotonic() - healed_s > patience(HEALED_S):
                self._run.violation(
                    f"{pod.uid}: {newest.name} is not durable {HEALED_S} s after all faults ended: {pod.sidecar.log()[-3000:]}"
                )
                return
            time.sleep(0.1)
        self._run.durable_after_s = time.monotonic() - healed_s
        self._run.note(f"the newest is durable {self._run.durable_after_s:.1f} s after all faults ended")

    def _end_earlier(self) -> None:
        """A pod that was replaced is fenced: it ends with its trainer, and commits nothing from then on."""
        for pod, since_s in self._earlier:
            if pod.trainer is not None and not pod.trainer.is_alive():
                pod.stop_training()
            code = ends(pod.sidecar, within_s=FENCED_S + pod.grace_s + SLACK_S + 30)
            pod.is_ending = True
            self._run.note(f"{pod.uid}: exit code {code} as the earlier pod")
            pod.stop_training()
            if code != EXIT_FENCED:
                self._run.violation(f"{pod.uid}: exit code {code} of a pod that was replaced: {pod.sidecar.log()[-2500:]}")
            for written in self._run.witness.written if self._run.witness else ():
                of_it = written.version is not None and written.version.pod == pod.uid
                if of_it and written.at_s > since_s + 3.0:
                    late_s = written.at_s - since_s
                    self._run.violation(f"{pod.uid}: committed {written.commit.name} {late_s:.1f} s after it was replaced")
            pod.close()

    def _resume_anew(self) -> None:
        """A new pod on a new volume resumes the newest, byte by byte."""
        newest = self._run.newest()
        pod = self._new_pod()
        if self._run.proxy is not None:
            self._run.proxy.begin(self._run.story.faults_in_resume)
        pod.start()
        trainer = pod.train()
        began_s = time.monotonic()
        while trainer.resumed is None and trainer.is_alive() and time.monotonic() - began_s < patience(HEALED_S):
            time.sleep(0.05)
        self._run.heal()
        if trainer.resumed is None or trainer.resumed["state"] != "ready" or trainer.resumed["checkpoint"] != newest:
            if not self._run.story.faults_in_resume:
                self._run.violation(f"a new volume got {trainer.resumed}, and the newest is {newest}")
            answer = pod.sidecar.up().resume()
            self._run.check_resumed(answer, pod.volume, of=newest)
        pod.stop_training()
        if (code := pod.terminate()) != EXIT_OK:
            self._run.violation(f"{pod.uid}: exit code {code} after a resume: {pod.sidecar.log()[-1500:]}")
        assert newest is None or step_of(newest) >= 0


def play(run: Run) -> None:
    with contextlib.ExitStack() as stack:
        Director(run, stack).play()
