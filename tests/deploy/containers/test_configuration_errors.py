"""What a person must change, in the image: one line on stderr, the same sentence in the termination message, exit code 2."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.process.daemon.misconfigured import CASES, Case, Settings, is_one_sentence

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

OWNER = ["--user=0:0", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp"]
"""Options of a container that owns the folders of a test (user 0) and has no capability."""


def ended(image: str, folder: Path, settings: Settings) -> tuple[int, str, str]:
    """Return exit code, stderr and termination message of a container that cannot start."""
    message, volume = folder / "termination-log", folder / "volume"
    message.touch()
    volume.mkdir()
    settings = {"CKPT_DIR": str(volume), "CKPT_API_PORT": str(free_port()), "AWS_EC2_METADATA_DISABLED": "true"} | settings
    options = [f"--volume={folder}:{folder}", f"--volume={message}:/dev/termination-log"]
    options += [f"--env={name}={value}" for name, value in settings.items()]
    command = ["docker", "run", "--rm", "--network=host", *OWNER, *options, image]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, done.stderr, message.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
def test_a_mistake_of_the_configuration_is_one_sentence_with_the_next_step(
    case: Case, sidecar_image: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        is_one_sentence(*ended(sidecar_image, tmp_path, case(tmp_path, stack)), about=CASES[case])


@pytest.mark.parametrize(
    ("store", "about"),
    [("/opt", "mount the volume of CKPT_STORE writable"), ("denied", "folder of CKPT_STORE readable")],
)
def test_a_store_that_is_not_writable_is_one_sentence_with_the_next_step(
    store: str, about: str, sidecar_image: str, tmp_path: Path
) -> None:
    (tmp_path / "denied").mkdir(mode=0o555)
    is_one_sentence(*ended(sidecar_image, tmp_path, {"CKPT_STORE": f"file://{tmp_path / store}"}), about=about)
