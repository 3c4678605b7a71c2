"""The images as OpenShift would run them: any UID with GID 0, nothing writable but the volume and /tmp, no capabilities."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from examples.demo.compose import call
from tests.deploy.containers.building import BASE, IMAGES, ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

OWN_USER = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp"]
"""What the image names, which a pod gets that says nothing of users."""
ANYBODY = ["--user=1000680000:0", *OWN_USER]
SIDECAR, TRAINER = IMAGES["SIDECAR_IMAGE"], IMAGES["TRAINER_IMAGE"]
LIMIT_BYTES = 250_000_000


def _image(name: str) -> Any:
    return json.loads(call(["docker", "image", "inspect", name]))[0]


def _python(image: str, program: str, *, python: str = "python") -> str:
    return call(["docker", "run", "--rm", "--network=none", *ANYBODY, f"--entrypoint={python}", image, "-c", program]).strip()


@contextlib.contextmanager
def _container(*arguments: str, rights: list[str] = ANYBODY) -> Iterator[str]:
    name = f"checkpoint-test-{uuid.uuid4().hex[:8]}"
    try:
        call(["docker", "run", "-d", "--name", name, "--network=none", *rights, "--tmpfs=/checkpoints:mode=777", *arguments])
        yield name
    finally:
        subprocess.run(["docker", "rm", "-f", name], check=False, capture_output=True)


def _until_healthy(name: str) -> None:
    until_s = time.monotonic() + 60
    while call(["docker", "inspect", "-f", "{{.State.Health.Status}}", name]).strip() != "healthy":
        assert time.monotonic() < until_s, call(["docker", "logs", name])
        time.sleep(0.2)


def test_the_sidecar_adds_little_to_its_base(images: dict[str, str], record_property: Any) -> None:
    added_bytes = _image(SIDECAR)["Size"] - _image(BASE)["Size"]
    record_property("added_bytes", added_bytes)
    print(f"{SIDECAR} is {added_bytes / 1e6:.0f} MB over {BASE}")
    assert 0 < added_bytes <= LIMIT_BYTES


@pytest.mark.parametrize("image", [SIDECAR, TRAINER])
def test_the_image_names_a_user_by_number_and_signals_its_program_directly(image: str, images: dict[str, str]) -> None:
    config = _image(image)["Config"]
    assert config["User"] == "10001:0"
    assert config["Entrypoint"][0] in ("checkpoint-sidecar", "python")
    assert not config.get("StopSignal")
    if image == SIDECAR:
        assert config["Healthcheck"]["Test"] == ["CMD", "checkpoint-sidecar", "probe"]


@pytest.mark.parametrize("image", [SIDECAR, TRAINER])
def test_the_image_says_what_it_is(image: str, images: dict[str, str]) -> None:
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in _image(image)["Config"]["Labels"].items()}
    assert labels.keys() >= {"title", "description", "licenses", "version", "revision", "created", "source", "base.name"}
    assert (labels["title"], labels["licenses"]) == (image.partition(":")[0], "Apache-2.0")
    assert labels["base.name"] == BASE


def test_the_sidecar_has_the_packages_of_its_lock_and_no_others(images: dict[str, str]) -> None:
    program = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found = {canonicalize_name(name): version for name, version in json.loads(_python(SIDECAR, program)).items()}
    locked = re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements-sidecar.lock").read_text(), re.MULTILINE)
    assert found.pop("checkpoint-sidecar")
    assert found == dict(locked)


LOOK_FOR_TOOLS = """
import importlib.util, shutil, sys
print(*(name for name in sys.argv[1].split() if importlib.util.find_spec(name)))
print(*(name for name in "pip pip3 gcc cc c++ g++ ld make cmake git".split() if shutil.which(name)))
"""


@pytest.mark.parametrize("python", ["/opt/venv/bin/python", "the base's"])
@pytest.mark.parametrize("image", [SIDECAR, TRAINER])
def test_no_build_tools_are_left(image: str, python: str, images: dict[str, str]) -> None:
    # PyTorch itself needs setuptools.
    modules = "pip ensurepip" if (image, python) == (TRAINER, "/opt/venv/bin/python") else "pip ensurepip setuptools wheel"
    base = ["--env=PATH=/usr/local/bin:/usr/bin:/bin", "--entrypoint=python3"]
    options = [f"--entrypoint={python}"] if python.startswith("/") else base
    assert call(["docker", "run", "--rm", *ANYBODY, *options, image, "-c", LOOK_FOR_TOOLS, modules]).split() == []


def test_the_trainer_has_the_hook_and_not_the_sidecar(images: dict[str, str]) -> None:
    program = "import importlib.util as u; print(u.find_spec('trainer_hook') is not None, u.find_spec('sidecar') is None)"
    assert _python(TRAINER, program) == "True True"


@pytest.mark.parametrize("image", [SIDECAR, TRAINER])
def test_an_arbitrary_user_can_change_nothing_in_the_image(image: str, images: dict[str, str]) -> None:
    program = """
import os
tops = "/opt", "/workspace", "/etc", "/usr"
places = (os.path.join(folder, name) for top in tops for folder, _, names in os.walk(top) for name in [".", *names])
print(*(p for p in places if not os.path.islink(p) and os.access(p, os.W_OK)))
"""
    options = ["--rm", "--user=1000680000:0", "--entrypoint=python", image, "-c", program]
    assert call(["docker", "run", *options]).split() == []


@pytest.mark.parametrize(("rights", "user"), [(ANYBODY, "1000680000:0"), (OWN_USER, "10001:0")], ids=["any user", "own user"])
def test_the_sidecar_is_healthy_and_ends_at_once_when_it_is_told(rights: list[str], user: str, images: dict[str, str]) -> None:
    store = ["--tmpfs=/store:mode=777", "--env=CKPT_STORE=file:///store", "--health-interval=0.5s"]
    folder = "/checkpoints/checkpoint-1"
    with _container(*store, SIDECAR, rights=rights) as name:
        _until_healthy(name)
        call(["docker", "exec", name, "sh", "-c", f"mkdir {folder} && echo x >{folder}/weights && touch {folder}/.complete"])
        call(["docker", "exec", name, "checkpoint-sidecar", "flush"])
        committed = ["/store/checkpoint-1/weights", "/store/checkpoint-1/.complete"]
        assert call(["docker", "exec", name, "stat", "-c", "%u:%g", *committed]).split() == [user, user]
        assert call(["docker", "exec", name, "cat", "/proc/1/comm"]).strip() == "checkpoint-side"
        began_s = time.monotonic()
        call(["docker", "stop", "--time=30", name])
        assert time.monotonic() - began_s < 10
        assert call(["docker", "inspect", "-f", "{{.State.ExitCode}}", name]).strip() == "0"
        assert "checkpoint-side" not in call(["docker", "logs", name])


def test_a_sidecar_that_is_told_to_end_while_it_starts_ends(images: dict[str, str]) -> None:
    with _container("--tmpfs=/store:mode=777", "--env=CKPT_STORE=file:///store", SIDECAR) as name:
        _until_sigterm_is_heard(name)
        call(["docker", "stop", "--time=30", name])
        assert call(["docker", "inspect", "-f", "{{.State.ExitCode}}", name]).strip() == "0", call(["docker", "logs", name])


def test_a_trainer_that_is_told_to_end_before_it_trains_ends(images: dict[str, str]) -> None:
    with _container(TRAINER, "python", "-c", "import time; time.sleep(100)") as name:
        _until_sigterm_is_heard(name)
        call(["docker", "stop", "--time=30", name])
        assert call(["docker", "inspect", "-f", "{{.State.ExitCode}}", name]).strip() == "143", call(["docker", "logs", name])


def _until_sigterm_is_heard(name: str) -> None:
    """Wait until PID 1 has blocked SIGTERM or handles it; what comes before, in the first hundredths of a second, is lost."""
    status = Path("/proc", call(["docker", "inspect", "-f", "{{.State.Pid}}", name]).strip(), "status")
    if not status.exists():
        pytest.skip("the processes of containers cannot be seen from here")
    until_s = time.monotonic() + 20
    while not any(
        int(mask, 16) & 1 << signal.SIGTERM - 1 for mask in re.findall(r"Sig(?:Blk|Cgt):\t(\w+)", status.read_text())
    ):
        assert time.monotonic() < until_s
