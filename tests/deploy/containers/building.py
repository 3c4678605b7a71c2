"""Builds the images as Compose does, without a package index: from wheels that this machine's pip fetched."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from examples.demo.compose import Failed, Project, call, compose_command

ROOT = Path(__file__).parents[3]
FILES = ("compose.yaml", "compose.ceph.yaml")
BASE = os.environ.get("BASE_IMAGE") or re.findall(r"(?m)^ARG BASE_IMAGE=(\S+)", (ROOT / "Dockerfile.sidecar").read_text())[0]
IMAGES = {
    "SIDECAR_IMAGE": "checkpoint-sidecar:test",
    "TRAINER_IMAGE": "checkpoint-trainer:test",
    "CEPH_IMAGE": "checkpoint-ceph:test",
}
LOCKS = ("requirements-build.lock", "requirements-sidecar.lock")
"""What Dockerfile.sidecar installs."""
WHEELS_PORT = 41_899
"""The address of the wheels is a build argument: with the same one every time, layers are found again."""


def why_not() -> str | None:
    """Return why containers cannot be run here."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    try:
        call(["docker", "info"])
        compose_command()
        if not call(["docker", "image", "ls", "-q", BASE]):
            call(["docker", "pull", "--quiet", BASE], timeout_s=600)
    except Failed as error:
        return f"{error} (deploy/images/base makes a base image without a registry; name it in BASE_IMAGE and CEPH_BASE_IMAGE)"
    return None


def is_required() -> bool:
    return bool(os.environ.get("CI")) or os.environ.get("CKPT_TEST_DOCKER") == "required"


def build(folder: Path, services: Sequence[str] = ("trainer", "sidecar", "s3")) -> None:
    """Build the images of these services, or find them built."""
    fetch_wheels(folder, trainer="trainer" in services)
    with serve(folder) as url:
        wheels = {"PIP_FIND_LINKS": url, "PIP_NO_INDEX": "1", "TORCH_INDEX_URL": "", "BUILD_NETWORK": "host"}
        none = {"PIP_INDEX_URL": "", "PIP_EXTRA_INDEX_URL": "", "PIP_TRUSTED_HOST": ""}
        project = Project("checkpoint-test-build", files=FILES, environ=IMAGES | wheels | none)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(project.build, services))


def fetch_wheels(folder: Path, *, trainer: bool = True) -> None:
    """Download what the sidecar's image installs, and the trainer's, for the Python of the base image."""
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = call(["docker", "run", "--rm", "--entrypoint=python3", BASE, "-c", version], timeout_s=600).strip()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        "--only-binary=:all:",
        "--python-version",
        python,
    ]
    locks = [part for name in LOCKS for part in ("--requirement", str(ROOT / name))]
    wanted = [["--require-hashes", *locks]]
    wanted += [["--constraint", str(ROOT / "constraints.txt"), "torch", "transformers", "accelerate"]] if trainer else []
    for arguments in wanted:
        _call_with_retries([*command, *arguments])


def _call_with_retries(command: list[str]) -> None:
    """Run a command that needs the network: pip keeps what arrived whole, and gives up on a file whose transfer broke."""
    if not any(subprocess.call(command, stdin=subprocess.DEVNULL) == 0 for _ in range(3)):
        raise Failed(f"{shlex.join(command)} failed three times")


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Yield the address at which the files of a folder can be had."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler)
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":  # fills pip's cache, without the time limit of a test
    with tempfile.TemporaryDirectory() as wheels:
        fetch_wheels(Path(wheels))
