"""Pods of one job that overlap: the later one holds the prefix, the earlier one is fenced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import ENDING_SILENCE_S
from tests import servers
from tests.marks import slow
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

EXIT_FENCED = 4
TRAINER = (
    "import sys, time, pathlib; from trainer_hook.volume import lease; "
    "lease.hold(pathlib.Path(sys.argv[1]), 0); print('held', flush=True); time.sleep(60)"
)


class Job:
    """Pods of one job on one prefix, each with a volume of its own."""

    def __init__(self, place: Place, tmp_path: Path) -> None:
        self._place = place
        self._tmp_path = tmp_path

    def pod(self, uid: str, **settings: str) -> AbstractContextManager[Sidecar]:
        its = {"POD_UID": uid, "POD_NAMESPACE": "team", "JOB_NAME": "train", "CKPT_GRACE_SECONDS": "30"} | settings
        return sidecar(self._tmp_path / uid, self._place.settings | its)


@pytest.fixture
def job(place: Place, tmp_path: Path) -> Job:
    return Job(place, tmp_path)


@contextmanager
def a_trainer(volume: Path) -> Iterator[None]:
    """A training process: nothing but its lease."""
    (volume / ".ckpt/ranks").mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(volume)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


def save(pod: Sidecar, step: int, content: bytes = b"state") -> None:
    write_checkpoint(pod.volume, f"checkpoint-{step}", {"model": content}, {"attempt": pod.volume.name})


def test_node_0_is_fenced_also_where_nothing_says_how_many_nodes_there_are(job: Job) -> None:
    """As in a TrainJob whose runtime has the sidecar: its pods know their index alone."""
    with job.pod("earlier-0", CKPT_NODE_INDEX="0") as first, job.pod("earlier-1", CKPT_NODE_INDEX="1") as second:
        first.ready()
        second.ready()
        with job.pod("later-0", CKPT_NODE_INDEX="0") as later:
            assert later.ready().status()["lease"]["state"] == "held"
            assert first.wait() == EXIT_FENCED
            assert second.terminate() == 0


def test_a_later_pod_takes_over_and_the_earlier_one_commits_nothing_more_and_ends(job: Job, place: Place) -> None:
    with job.pod("earlier") as earlier:
        save(earlier.ready(), 10)
        earlier.committed("checkpoint-10")
        with job.pod("later") as later:
            assert later.ready().resume()["checkpoint"] == "checkpoint-10"
            assert later.status()["lease"]["state"] == "held"
            save(earlier, 20, b"of the earlier pod")
            assert earlier.wait() == EXIT_FENCED
            [fenced] = earlier.events("fenced")
            assert "later" in fenced["reason"]
            assert earlier.report["exit_code"] == EXIT_FENCED
            assert [each["checkpoint"] for each in earlier.report["given_up"]] == ["checkpoint-20"]
            assert keys.commit("checkpoint-20") not in place.keys("checkpoint-20/")
            save(later, 20, b"of the later pod")
            later.committed("checkpoint-20")
            assert place.read("checkpoint-20/model") == b"of the later pod"
            assert later.terminate() == 0
        with job.pod("latest") as latest:
            assert latest.ready().resume()["checkpoint"] == "checkpoint-20"


class HeldRequest:
    """Rule of a proxy: a network that holds the bodies of one key until ``released``, and passes them on then."""

    def __init__(self, key: str) -> None:
        self.came, self.released = threading.Event(), threading.Event()
        self._key = key

    def __call__(self, request: servers.Request) -> None:
        if request.method == "PUT" and urlsplit(request.path).path.endswith(self._key):
            self.came.set()
            assert self.released.wait(120)


@pytest.mark.parametrize("place", ["moto", *servers.REAL_STORES], indirect=True)
@pytest.mark.parametrize("repeats", [1, *slow(200_000)])
def test_a_file_of_the_earlier_pod_that_arrives_after_the_commit_of_the_later_one_changes_nothing(
    job: Job, place: Place, repeats: int
) -> None:
    ours, theirs = b"of the later pod" * repeats, b"of the earlier pod" * repeats
    held = HeldRequest("/checkpoint-20/model")
    proxy = servers.Proxy(place.settings["AWS_S3_ENDPOINT"], held)
    with proxy.running() as endpoint, job.pod("earlier", AWS_S3_ENDPOINT=endpoint) as earlier:
        save(earlier.ready(), 20, theirs)
        assert held.came.wait(60)
        with job.pod("later") as later:
            save(later.ready(), 20, ours)
            later.committed("checkpoint-20")
            assert later.terminate() == 0, "before it looks at the commit again"
        held.released.set()
        assert earlier.wait() == EXIT_FENCED
    until(lambda: not proxy.in_flight, what="all that was held has arrived")
    assert place.read("checkpoint-20/model") == ours
    with job.pod("latest") as latest:
        assert latest.ready().resume()["checkpoint"] == "checkpoint-20"


@ON_ONE_STORE
def test_the_trainer_of_a_fenced_pod_is_told_to_stop_and_the_sidecar_waits_for_its_end(job: Job) -> None:
    with job.pod("earlier") as earlier:
        with a_trainer(earlier.ready().volume), job.pod("later") as later:
            later.ready()
            until(lambda: (earlier.volume / ".ckpt/terminating").exists(), what="the trainer is told")
            assert json.loads((earlier.volume / ".ckpt/terminating").read_text())["source"] == "fenced"
            assert earlier.call("GET", "/readyz")["http_status"] == 503
            assert earlier.status()["lease"]["state"] == "fenced"
            assert earlier.process.poll() is None
        assert earlier.wait() == EXIT_FENCED


@ON_ONE_STORE
def test_a_pod_that_was_fenced_stays_fenced_when_its_sidecar_starts_again(job: Job) -> None:
    with job.pod("earlier") as earlier:
        earlier.ready()
        until(lambda: earlier.status()["lease"]["state"] == "held")
        earlier.kill()
    with job.pod("later") as later:
        later.ready()
        notice = earlier.volume / ".ckpt/terminating"
        notice.write_text('{"at": "2026-01-01T00:00:00Z", "source": "sigterm"}')
        with job.pod("earlier") as again:
            assert again.wait() == EXIT_FENCED
            assert json.loads(notice.read_text())["source"] == "fenced", "a trainer that started since believes no older one"
            assert "a later pod of this job (later)" in again.log()
        assert later.status()["lease"]["state"] == "held"


@ON_ONE_STORE
@pytest.mark.slow
def test_a_pod_that_flushes_is_waited_for_and_its_last_step_is_resumed(job: Job) -> None:
    with job.pod("earlier", CKPT_BANDWIDTH_LIMIT="2MB/s") as earlier:
        save(earlier.ready(), 10)
        earlier.committed("checkpoint-10")
        save(earlier, 20, bytes(30_000_000))
        until(lambda: earlier.status()["sent_bytes"] > 1_000_000)
        earlier.process.send_signal(signal.SIGTERM)
        until(lambda: b'"ending"' in job._place.store.get(keys.RUN))
        with job.pod("later") as later:
            until(lambda: later.events("waits_for_earlier_pod"), what="the later pod waits")
            assert later.up().call("GET", "/readyz")["http_status"] == 503
            assert "earlier" in later.status()["lease"]["reason"]
            assert later.resume()["checkpoint"] == "checkpoint-20"
            assert earlier.wait() == 0


@ON_ONE_STORE
@pytest.mark.slow
def test_a_pod_that_is_killed_while_it_flushes_is_not_waited_for_until_its_deadline(job: Job) -> None:
    with job.pod("earlier", CKPT_BANDWIDTH_LIMIT="200kB/s", CKPT_GRACE_SECONDS="300") as earlier:
        save(earlier.ready(), 20, bytes(16_000_000))
        until(lambda: earlier.events("checkpoint_uploading"))
        earlier.process.send_signal(signal.SIGTERM)
        until(lambda: b'"ending"' in job._place.store.get(keys.RUN))
        earlier.kill()
    began_s = time.monotonic()
    with job.pod("later") as later:
        assert later.up().resume()["state"] == "none"
        assert time.monotonic() - began_s < 3 * ENDING_SILENCE_S


@ON_ONE_STORE
@pytest.mark.slow
def test_a_pod_that_was_stopped_during_its_upload_does_not_commit_after_the_take_over(job: Job, place: Place) -> None:
    with job.pod("earlier", CKPT_BANDWIDTH_LIMIT="4MB/s", CKPT_PART_SIZE="5Mi") as earlier:
        save(earlier.ready(), 20, bytes(30_000_000))
        until(lambda: earlier.status()["sent_bytes"] > 1_000_000)
        earlier.process.send_signal(signal.SIGSTOP)
        with job.pod("later") as later:
            assert later.ready().resume()["state"] == "none"
            earlier.process.send_signal(signal.SIGCONT)
            assert earlier.wait() == EXIT_FENCED
            assert keys.commit("checkpoint-20") not in place.keys("checkpoint-20/")


@ON_ONE_STORE
@pytest.mark.slow
def test_nodes_of_an_earlier_attempt_commit_nothing_after_the_take_over(job: Job, place: Place) -> None:
    def node(uid: str, index: int) -> AbstractContextManager[Sidecar]:
        return job.pod(uid, CKPT_NODE_INDEX=str(index), CKPT_NODE_COUNT="2")

    def part(pod: Sidecar, step: int, attempt: str) -> None:
        files = {f"part-{pod.volume.name[-1]}": attempt.encode()}
        write_checkpoint(pod.volume, f"checkpoint-{step}", files, {"attempt": attempt})

    with node("earlier-0", 0) as zero, node("earlier-1", 1) as one:
        for pod in (zero.ready(), one.ready()):
            part(pod, 10, "20270101T000000Z-a")
        for pod in (zero, one):
            pod.committed("checkpoint-10")
        part(zero, 20, "20270101T000000Z-a")  # its part is there, and node 1 is cut off
        until(lambda: any("/.ckpt/" in key for key in place.keys("checkpoint-20/")), what="the part of node 0")
        with node("later-0", 0) as later_zero, node("later-1", 1) as later_one:
            assert zero.wait() == EXIT_FENCED
            for pod in (later_zero.ready(), later_one.ready()):
                part(pod, 15, "20270101T000100Z-b")
            for pod in (later_zero, later_one):
                pod.committed("checkpoint-15")
            part(one, 20, "20270101T000000Z-a")
            # It is given up; or it waits, if node 0 committed the step before and this node never asked for its epoch.
            refused = "node 0 of attempt 20270101T000000Z-a does not hold the prefix"
            until(lambda: refused in one.log(), what=lambda: f"the commit is refused; {one.log()[-3000:]}")
            assert one.process.poll() is None, "the pod of node 1 may belong to both attempts"
            assert keys.commit("checkpoint-20") not in place.keys("checkpoint-20/")
