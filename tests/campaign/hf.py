"""A run of a real trainer: a Hugging Face ``Trainer`` under the hook, preempted and finished in a new pod."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

from tests.campaign.pods import EXIT_OK, Pod
from tests.campaign.published import files_of
from tests.campaign.reader import step_of
from tests.campaign.run import Run
from tests.hook.job import Training, finished, script, training

STEPS = 14
PREEMPTED = 143
TOLD = {"args": {"max_steps": STEPS}}
SETTINGS = {"CKPT_KEEP_LOCAL": "99", "CKPT_GRACE_SECONDS": "30", "CKPT_MODE": "native"}
LONG_S = 240.0


def play(run: Run) -> None:
    if run.witness is not None:
        run.witness.knows_all = False
    run.settings |= SETTINGS
    run.settings.pop("CKPT_KEEP_STORE", None)
    life = run.story.lives[0]
    with contextlib.ExitStack() as stack:
        first = _pod(run, stack, "hf-0")
        if run.proxy is not None:
            run.proxy.begin(life.troubles)
        with _trains(run, first, sleep_s=0.25) as trains:
            trains.at_step(random.Random(run.story.seed).randrange(3, 10))
            run.note("SIGTERM to the trainer")
            if (code := trains.terminate(timeout_s=LONG_S)) != PREEMPTED:
                run.violation(f"the trainer ended with {code}: {trains.log()[-2000:]}")
            run.notes += trains.log().splitlines()[-5:]
        run.faults["preempted"] += 1
        _publish(run, first.volume)
        _wait_and_end(run, first, life.ends_after_s)
        second = _pod(run, stack, "hf-1")
        if run.proxy is not None:
            run.proxy.begin(run.story.faults_in_resume)
        newest = max((step_of(name) for name in run.reader.names()), default=0)
        with _trains(run, second) as trains:
            if (code := trains.wait(timeout_s=LONG_S)) != 0:
                run.violation(f"the resumed trainer ended with {code}: {trains.log()[-2000:]}")
            run.digest = trains.weights()
            first_step = min(trains.steps(), default=STEPS + 1)
            if first_step != newest + 1:
                run.violation(f"the trainer went on at step {first_step}, and checkpoint-{newest} was committed")
        _publish(run, second.volume)
        run.heal()
        _wait_and_end(run, second, 0.0)
        run.check_store()


def _pod(run: Run, stack: contextlib.ExitStack, uid: str) -> Pod:
    volume = run.folder / uid
    volume.mkdir()
    pod = Pod(run, uid, volume)
    stack.callback(pod.close)
    pod.start()
    return pod


def _trains(run: Run, pod: Pod, **more: float) -> contextlib.AbstractContextManager[Training]:
    settings = {"CKPT_API_PORT": str(pod.sidecar.port), "CKPT_SAVE_STEPS": "3"}
    return training(script(**TOLD, **more), pod.volume, settings)


def _publish(run: Run, volume: Path) -> None:
    """Remember what is on a volume that nothing rotates."""
    for name in finished(volume):
        run.published.add(name, volume.name, {0: files_of(volume / name)})


def _wait_and_end(run: Run, pod: Pod, wait_s: float) -> None:
    """SIGTERM after the trainer's end, as Kubernetes does; if that was too early, another sidecar finishes without faults."""
    time.sleep(wait_s)
    code = pod.terminate()
    run.heal()
    if code == EXIT_OK:
        names = [name for name in finished(pod.volume) if name != "final"]
        if names and names[-1] not in run.reader.names():
            run.violation(f"{pod.uid}: exit code 0, and {names[-1]} is not in the store")
        return
    pod.start()
    deadline_s = time.monotonic() + 150
    while set(finished(pod.volume)) - set(run.reader.names()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    if (code := pod.terminate()) != EXIT_OK:
        run.violation(f"{pod.uid}: exit code {code} on a healthy store: {pod.sidecar.log()[-2500:]}")
