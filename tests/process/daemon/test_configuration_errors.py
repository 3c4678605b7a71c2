"""What a person must change: one line on stderr, the same sentence in the termination message, exit code 2."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.core.format import keys
from tests.ports import free_port
from tests.process.conftest import Place
from tests.process.sidecar_process import sidecar

RUN = """
import sys, pathlib
from sidecar.daemon import termination_message
termination_message.FILE = pathlib.Path(sys.argv.pop())
from sidecar.__main__ import main
sys.exit(main())
"""


def ended(tmp_path: Path, settings: dict[str, str]) -> tuple[int, str, str]:
    """Return exit code, stderr and termination message of a life that cannot begin."""
    message = tmp_path / "termination-log"
    message.touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "AWS_"))}
    environ |= {"CKPT_DIR": str(tmp_path / "volume"), "CKPT_API_PORT": str(free_port()), "AWS_EC2_METADATA_DISABLED": "true"}
    (tmp_path / "volume").mkdir(exist_ok=True)
    command = [sys.executable, "-c", RUN, "run", str(message)]
    done = subprocess.run(command, env=environ | settings, capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, done.stderr, message.read_text()


def another_job(place: Place, _: Path) -> dict[str, str]:
    place.store.put(keys.RUN, b'{"format": 1, "run_id": "theirs", "job": "team/other"}')
    return place.settings | {"POD_NAMESPACE": "team", "JOB_NAME": "mine"}


def another_run(place: Place, _: Path) -> dict[str, str]:
    place.store.put(keys.RUN, b'{"format": 1, "run_id": "theirs"}')
    return place.settings | {"CKPT_RUN_ID": "mine"}


def foreign_document(place: Place, _: Path) -> dict[str, str]:
    place.store.put(keys.RUN, b"<html>")
    return place.settings


def no_volume(place: Place, tmp_path: Path) -> dict[str, str]:
    return place.settings | {"CKPT_DIR": str(tmp_path / "nowhere")}


def no_state_directory(place: Place, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").touch()
    return place.settings | {"CKPT_STATE_DIR": str(tmp_path / "file" / "state")}


def no_place_for_the_hook(place: Place, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").touch()
    return place.settings | {"CKPT_INSTALL_HOOK": str(tmp_path / "file" / "hook")}


def port_in_use(place: Place, _: Path) -> dict[str, str]:
    server = socket.create_server(("127.0.0.1", free_port()))
    atexit.register(server.close)
    return place.settings | {"CKPT_API_PORT": str(server.getsockname()[1])}


def unknown_setting(place: Place, _: Path) -> dict[str, str]:
    return place.settings | {"CKPT_GRACE_SECOND": "30"}


def wrong_value(place: Place, _: Path) -> dict[str, str]:
    return place.settings | {"CKPT_PART_SIZE": "many"}


CASES: dict[Callable[[Place, Path], dict[str, str]], str] = {
    another_job: "give each run its own prefix in CKPT_STORE",
    another_run: "or set CKPT_RUN_ID=theirs to go on with that run",
    foreign_document: "choose an empty prefix in CKPT_STORE",
    no_volume: "mount the volume that the trainer writes to",
    no_state_directory: "mount an emptyDir there",
    no_place_for_the_hook: "is a file, not a folder",
    port_in_use: "is another sidecar running",
    unknown_setting: "CKPT_GRACE_SECONDS",
    wrong_value: "CKPT_PART_SIZE",
}


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
def test_a_mistake_of_the_configuration_is_one_sentence_with_the_next_step(
    case: Callable[[Place, Path], dict[str, str]], place: Place, tmp_path: Path
) -> None:
    _is_one_sentence(*ended(tmp_path, case(place, tmp_path)), about=CASES[case])


def wrong_secret(settings: dict[str, str]) -> dict[str, str]:
    return settings | {"AWS_SECRET_ACCESS_KEY": "wrong"}


def wrong_key(settings: dict[str, str]) -> dict[str, str]:
    return settings | {"AWS_ACCESS_KEY_ID": "nobody"}


def no_bucket(settings: dict[str, str]) -> dict[str, str]:
    return settings | {"CKPT_STORE": "s3://there-is-no-such-bucket/run"}


def no_credentials(settings: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if "ACCESS_KEY" not in name}


@pytest.mark.parametrize("place", [pytest.param("rgw", marks=pytest.mark.rgw)], indirect=True)
@pytest.mark.parametrize(
    "change", [wrong_secret, wrong_key, no_bucket, no_credentials], ids=lambda change: str(change.__name__)
)
def test_a_store_that_refuses_access_is_one_sentence_with_the_next_step(
    change: Callable[[dict[str, str]], dict[str, str]], place: Place, tmp_path: Path
) -> None:
    _is_one_sentence(*ended(tmp_path, change(place.settings)), about=":")


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_of_two_unnamed_jobs_the_second_one_says_it_in_one_sentence(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "first", place.settings | {"JOB_NAME": ""}) as first:
        first.ready()
        _is_one_sentence(*ended(tmp_path, place.settings), about="give each run its own prefix in CKPT_STORE")


def _is_one_sentence(code: int, stderr: str, message: str, *, about: str) -> None:
    assert code == 2, stderr
    assert about in message
    [line] = stderr.splitlines()
    assert line.startswith("checkpoint-sidecar")
    assert line.endswith(message)
    assert "Traceback" not in stderr
    assert "ExceptionGroup" not in stderr
