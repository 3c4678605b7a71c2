"""A CephFS claim that pods on two nodes mount: as the store, and as the shared volume."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from sidecar.core.format import keys
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint

pytestmark = pytest.mark.rgw
EXIT_FENCED = 4
MARKER = {"attempt": "first", "created_at": "2026-01-01T00:00:00Z", "node_count": 2}


class Claim(NamedTuple):
    """A claim that each node has mounted at a place of its own, and every pod at ``path``."""

    nodes: Sequence[Path]
    path: Path

    def mounted(self, node: int) -> list[str]:
        """Return what goes before a command that has the claim of a node at ``path``."""
        mount = f'mount --bind "{self.nodes[node]}" "{self.path}" && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]

    def pod(self, volume: Path, node: int, **settings: str) -> AbstractContextManager[Sidecar]:
        """Run a sidecar on a node."""
        mine = {"CKPT_STORE": f"file://{self.path}/runs/llama", "CKPT_GRACE_SECONDS": "30"} | settings
        return sidecar(volume, mine, within=self.mounted(node))


@pytest.fixture
def claim(cephfs: tuple[Path, Path], tmp_path: Path) -> Claim:
    name = uuid.uuid4().hex
    (cephfs[0] / name).mkdir()
    (tmp_path / "claim").mkdir()
    return Claim([mount / name for mount in cephfs], tmp_path / "claim")


def node(index: int) -> dict[str, str]:
    return {"CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": "2"}


def test_nodes_commit_together_and_new_pods_on_the_other_nodes_resume(claim: Claim, tmp_path: Path) -> None:
    with claim.pod(tmp_path / "0", 0, **node(0)) as first, claim.pod(tmp_path / "1", 1, **node(1)) as second:
        for running in (first.ready(), second.ready()):
            for step in (10, 20, 30):
                files = {f"part-{running.volume.name}": os.urandom(3 << 20), "rng": running.volume.name.encode()}
                write_checkpoint(running.volume, f"checkpoint-{step}", files, MARKER)
        for running in (first, second):
            running.committed("checkpoint-30")
        first.kill()
        second.kill()
    for index in (0, 1):
        with claim.pod(tmp_path / f"new-{index}", 1 - index, **node(index)) as running:
            assert running.up().resume()["checkpoint"] == "checkpoint-30"
            assert contents(running.volume / "checkpoint-30") == {
                **{f"part-{of}": (tmp_path / f"{of}/checkpoint-30/part-{of}").read_bytes() for of in (0, 1)},
                "rng": str(index).encode(),
            }


def test_a_later_pod_on_another_node_fences_the_earlier_one(claim: Claim, tmp_path: Path) -> None:
    its = {"POD_NAMESPACE": "team", "JOB_NAME": "train"}
    with claim.pod(tmp_path / "earlier", 0, POD_UID="earlier", **its) as earlier:
        write_checkpoint(earlier.ready().volume, "checkpoint-10", {"model": b"of the earlier pod"}, {"attempt": "a"})
        earlier.committed("checkpoint-10")
        with claim.pod(tmp_path / "later", 1, POD_UID="later", **its) as later:
            assert later.ready().resume()["checkpoint"] == "checkpoint-10"
            assert earlier.wait() == EXIT_FENCED
            write_checkpoint(later.volume, "checkpoint-20", {"model": b"of the later pod"}, {"attempt": "b"})
            later.committed("checkpoint-20")
            assert (claim.nodes[0] / "runs/llama" / keys.commit("checkpoint-20")).exists()


@contextmanager
def silent_metadata_server(cephfs: tuple[Path, Path]) -> Iterator[None]:
    """Let every access to the file system hang that needs more than a client's cache."""
    pid = int((cephfs[0].parent / "run/mds.a.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_claim_that_hangs_ends_no_sidecar_and_is_used_again(claim: Claim, cephfs: tuple[Path, Path], tmp_path: Path) -> None:
    with claim.pod(tmp_path / "volume", 0) as running:
        write_checkpoint(running.ready().volume, "checkpoint-10", {"model": b"10"}, {"attempt": "a"})
        running.committed("checkpoint-10")
        with silent_metadata_server(cephfs):
            write_checkpoint(running.volume, "checkpoint-20", {"model": b"20"}, {"attempt": "a"})
            until(lambda: running.status()["queue"])
            assert running.call("GET", "/healthz")["http_status"] == 200
        running.committed("checkpoint-20")
        assert running.terminate() == 0


def test_a_sidecar_whose_claim_hangs_ends_by_its_deadline(claim: Claim, cephfs: tuple[Path, Path], tmp_path: Path) -> None:
    """The kernel lets no process go whose thread waits for a FUSE server, so the report counts, which comes before that."""
    with claim.pod(tmp_path / "volume", 0, CKPT_GRACE_SECONDS="10") as running:
        running.ready()
        with silent_metadata_server(cephfs):
            write_checkpoint(running.volume, "checkpoint-20", {"model": b"20"}, {"attempt": "a"})
            until(lambda: running.status()["queue"])
            running.process.terminate()
            until(lambda: running.events("exit_report"), timeout_s=15)
        assert running.wait() == 3
        assert [each["checkpoint"] for each in running.report["given_up"]] == ["checkpoint-20"]
        assert running.report["grace_used_s"] < 10


def test_a_volume_on_cephfs_is_watched_uploaded_and_resumed(cephfs: tuple[Path, Path], tmp_path: Path) -> None:
    store, volumes = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}, [mount / uuid.uuid4().hex for mount in cephfs]
    with sidecar(volumes[0], store) as running:
        write_checkpoint(running.ready().volume, "checkpoint-10", {"model": os.urandom(20 << 20)}, {"attempt": "a"})
        running.committed("checkpoint-10")
        assert running.terminate() == 0
    with sidecar(volumes[1], store) as other:
        assert other.up().resume()["checkpoint"] == "checkpoint-10"
        assert contents(other.volume / "checkpoint-10") == contents(volumes[0] / "checkpoint-10")
