"""What a person must change: one line on stderr, the same sentence in the termination message, exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.process.conftest import Place
from tests.process.daemon.misconfigured import CASES, Case, is_one_sentence

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
def test_a_mistake_of_the_configuration_is_one_sentence_with_the_next_step(case: Case, tmp_path: Path) -> None:
    with ExitStack() as stack:
        is_one_sentence(*ended(tmp_path, case(tmp_path, stack)), about=CASES[case])


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
    is_one_sentence(*ended(tmp_path, change(place.settings)), about=":")
