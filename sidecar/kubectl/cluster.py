"""kubectl as a subprocess: objects, commands in a sidecar, and errors that name the next step."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidecar.core.job.pods import SIDECAR
from sidecar.errors import ConfigurationError, NothingFound, SidecarError
from trainer_hook.contract.plain_text import plain_text

CALL_S = 30.0
"""Timeout of one call, in seconds; a command in a sidecar has its own."""
_UNREACHABLE = (
    "Unable to connect",
    "connection refused",
    "was refused",
    "no such host",
    "i/o timeout",
    "TLS handshake timeout",
)
_UNKNOWN_KIND = "the server doesn't have a resource type"


class ClusterUnreachable(SidecarError):
    """The API server, or a sidecar behind it, does not answer."""


class UnknownKind(SidecarError):
    """The cluster has no such kind of object."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command in a pod printed."""

    code: int
    stdout: str
    stderr: str

    def answer(self) -> dict[str, Any] | None:
        """Return the JSON object on its last line; ``None``: there is none."""
        lines = self.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1]) if lines else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def problem(self) -> str:
        """Return why it failed, in one line."""
        said = [line for line in self.stderr.splitlines() if line and not line.startswith("command terminated")]
        error = (self.answer() or {}).get("error")
        return plain_text(str(error or (said[-1] if said else f"exit code {self.code}")))


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with the options of this call."""

    namespace: str | None = None
    context: str | None = None

    def command(self, *arguments: str) -> list[str]:
        """Return the whole command line."""
        where = [*(("--context", self.context) if self.context else ()), *(("-n", self.namespace) if self.namespace else ())]
        return ["kubectl", *where, *arguments]

    def run(self, *arguments: str, timeout_s: float = CALL_S) -> str:
        """Return what kubectl printed.

        Raises:
            ConfigurationError: There is no kubectl, no cluster is configured, or a right is missing.
            ClusterUnreachable: The API server does not answer.
            UnknownKind: The cluster does not have this kind.
            NothingFound: The object does not exist.
            SidecarError: Anything else.
        """
        done = self.attempt(*arguments, timeout_s=timeout_s)
        if done.code:
            raise _error(arguments, done.stderr)
        return done.stdout

    def end_of(self, *arguments: str, most_bytes: int) -> str:
        """Run kubectl and return the end of its output: whole lines, at most ``most_bytes`` bytes. Raises as ``run``."""
        with tempfile.TemporaryFile() as file:
            done = self._run(arguments, CALL_S, stdout=file, stderr=subprocess.PIPE)
            if done.returncode:
                raise _error(arguments, done.stderr.decode(errors="replace"))
            begin = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(begin)
            text = file.read()
        return (text.partition(b"\n")[2] if begin else text).decode(errors="replace")

    def attempt(self, *arguments: str, timeout_s: float = CALL_S) -> Done:
        """Return what kubectl printed, whatever its exit code. Raises as ``run`` if it cannot start or does not end."""
        done = self._run(arguments, timeout_s, capture_output=True)
        return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def _run(self, arguments: tuple[str, ...], timeout_s: float, **streams: Any) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(self.command(*arguments), timeout=timeout_s, stdin=subprocess.DEVNULL, **streams)
        except FileNotFoundError:
            raise ConfigurationError("kubectl is not in PATH: install it (https://kubernetes.io/docs/tasks/tools/)") from None
        except subprocess.TimeoutExpired:
            raise ClusterUnreachable(
                f"'kubectl {' '.join(arguments)}' did not end within {timeout_s:g} s: is the cluster reachable?"
            ) from None

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object, or a list of objects, as JSON. Raises as ``run``."""
        found = json.loads(self.run("get", *arguments, "-o", "json"))
        assert isinstance(found, dict)
        return found

    def ask(self, pod: str, *command: str, timeout_s: float = CALL_S) -> Done:
        """Run ``checkpoint-sidecar COMMAND`` in a pod's sidecar.

        Raises:
            ConfigurationError: The right to do this is missing, or kubectl.
            ClusterUnreachable: It did not end in time.
        """
        return _permitted(self.attempt("exec", pod, "-c", SIDECAR, "--", SIDECAR, *command, timeout_s=timeout_s))

    def follow(self, pod: str, *command: str, on_line: Callable[[str], None]) -> Done:
        """Do as ``ask``, without a time limit: the command has one. Each line on standard error is passed on at once."""
        arguments = ("exec", pod, "-c", SIDECAR, "--", SIDECAR, *command)
        said: list[str] = []
        with subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as process:
            assert process.stderr is not None
            assert process.stdout is not None
            for line in process.stderr:
                said.append(line)
                on_line(line.rstrip("\n"))
            printed = process.stdout.read()  # one line of JSON: the pipe holds it
        return _permitted(Done(process.returncode, printed, "".join(said)))


def _permitted(done: Done) -> Done:
    if done.code and done.stderr.startswith("Error from server (Forbidden)"):
        raise _error(("exec",), done.stderr)
    return done


def _error(arguments: tuple[str, ...], stderr: str) -> SidecarError:
    lines = [line for line in stderr.strip().splitlines() if line]
    text = plain_text(lines[-1] if lines else f"kubectl {arguments[0]} failed and said nothing")
    if _UNKNOWN_KIND in stderr:
        return UnknownKind(text)
    if "(NotFound)" in stderr:
        return NothingFound(text)
    if "(Forbidden)" in stderr:
        return ConfigurationError(f"{text}: ask for a role with this right")
    if any(sign in stderr for sign in _UNREACHABLE):
        return ClusterUnreachable(f"{text}: check --context and KUBECONFIG")
    if "context was not found" in stderr or ("context" in stderr and "does not exist" in stderr):
        return ConfigurationError(f"{text}: 'kubectl config get-contexts' lists them")
    return SidecarError(text)
