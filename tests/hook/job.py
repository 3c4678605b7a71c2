"""A training script as a real process under the hook, and a sidecar for it: a real one, or one that only answers."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.forks import Forks, forks
from tests.process.sidecar_process import until
from tests.processes import children_of
from trainer_hook.activation.run_command import environment_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
PATIENCE_S = 120.0
"""Three processes that import torch on a machine that is busy take most of a minute."""
HOOKED = ["-m", "trainer_hook", "run", "--"]
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")


def plain_environ() -> dict[str, str]:
    """Return this process's environment without what would steer the hook, a launcher or a hub."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("CKPT_", "AWS_", "TORCH", "PET_", "ACCELERATE_"))}
    for name in RANK_VARIABLES:
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def script(**told: Any) -> list[str]:
    """Return the command of ``scripts/train.py``."""
    return [sys.executable, str(SCRIPTS / "train.py"), json.dumps(told)]


Start = Callable[[list[str], Path, Mapping[str, str], Path], Any]
"""Starts a command in a folder, with an environment and a log, in a session of its own. Returns what acts as a ``Popen``."""


def popen(command: list[str], folder: Path, environ: Mapping[str, str], log_path: Path) -> Any:
    with log_path.open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


SHARDING = ("torch.distributed.checkpoint", "torch.distributed.fsdp")
TRAINER_MODULES = ("torch", "accelerate", "datasets", "tokenizers", "transformers.modeling_utils", *SHARDING)
"""What trainers of the Hugging Face family import, but for ``transformers.trainer``, whose import activates the hook."""

USUAL = [SCRIPTS / f"{name}.py" for name in ("behaviour", "callbacks", "in_child", "nested", "partial_saves", "train")]


def forked(warm: Forks) -> Start:
    """Return a ``Start`` for Python scripts, also behind ``python -m trainer_hook run --``, that forks a warm interpreter."""

    def start(command: list[str], folder: Path, environ: Mapping[str, str], log_path: Path) -> Any:
        if command[1:5] == HOOKED:
            command, environ = command[5:], environment_for(environ)
        return warm.start(command[1:], environ=environ, log=log_path, folder=folder)

    return start


@functools.cache
def _trainer_forks() -> Forks:
    warm = forks(*TRAINER_MODULES, environ=plain_environ())
    atexit.register(warm.__exit__, None, None, None)
    return warm.__enter__()


def usual_start(command: list[str], folder: Path, environ: Mapping[str, str], log_path: Path) -> Any:
    """Fork a script of ``USUAL``. Start anything else."""
    script = command[5:] if command[1:5] == HOOKED else command
    is_usual = script[:1] == [sys.executable] and Path(script[1]) in USUAL
    start = forked(_trainer_forks()) if is_usual else popen
    return start(command, folder, environ, log_path)


def warm_ranks() -> dict[str, str]:
    """Return settings of torchrun with which its ranks are forked from the warm interpreter, for tests of no launcher."""
    return {"PYTHON_EXEC": str(ROOT / "tests/warm_rank"), "FORKS": _trainer_forks().path}


class Training:
    """A process under ``python -m trainer_hook run`` whose output goes to a file."""

    def __init__(
        self,
        command: list[str],
        volume: Path,
        settings: Mapping[str, str],
        *,
        hooked: bool = True,
        within: Sequence[str] = (),
        start: Start = usual_start,
    ) -> None:
        work = volume.parent / f"{volume.name}-work"
        work.mkdir(exist_ok=True)
        self.volume = volume
        self.work = work
        self._log_path = work / f"log-{time.monotonic_ns()}"
        prefix = [*within, *([sys.executable, *HOOKED] if hooked else [])]
        environ = plain_environ() | {"CKPT_DIR": str(volume), "PYTHONPATH": str(ROOT)} | dict(settings)
        self.process = start([*prefix, *command], work, environ, self._log_path)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def said(self, text: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a text is in the output."""

        def there() -> bool:
            gone = self.process.poll() is not None
            if text in self.log():
                return True
            assert not gone, f"ended with {self.process.poll()} before {text!r}:\n{self.log()}"
            return False

        until(there, timeout_s=timeout_s, what=lambda: f"{text!r} in:\n{self.log()[-3000:]}")

    def at_step(self, step: int, *, rank: int = 0) -> None:
        self.said(f"rank {rank} step {step}\n")

    def terminate(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s:\n{self.log()[-3000:]}") from None

    def steps(self, *, rank: int = 0) -> list[int]:
        """Return the steps that were trained."""
        return [int(step) for step in re.findall(rf"^rank {rank} step (\d+)$", self.log(), re.MULTILINE)]

    def weights(self) -> str:
        """Return the digest that a finished script prints."""
        return re.findall(r"^weights (\w+)$", self.log(), re.MULTILINE)[-1]

    def children(self) -> list[int]:
        """Return the pids of the direct children."""
        return children_of(self.process.pid)

    def close(self) -> None:
        """End the process and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def training(
    command: list[str],
    volume: Path,
    settings: Mapping[str, str] | None = None,
    *,
    hooked: bool = True,
    within: Sequence[str] = (),
    start: Start = usual_start,
) -> Iterator[Training]:
    """Run a training process for the length of the context. ``within``: what goes before its command."""
    volume.mkdir(parents=True, exist_ok=True)
    running = Training(command, volume, settings or {}, hooked=hooked, within=within, start=start)
    try:
        yield running
    finally:
        running.close()


def marker(volume: Path, name: str) -> Any:
    """Return the content of a marker."""
    return json.loads((volume / name / ".complete").read_bytes())


def finished(volume: Path) -> list[str]:
    """Return the names of finished checkpoints, in the order of their steps."""
    found = [path.parent.name for path in volume.glob("*/.complete")]
    return sorted(found, key=lambda name: (len(name), name))


def trainer_state(volume: Path) -> Any:
    return json.loads((volume / ".ckpt/trainer.json").read_bytes())


class Answers:
    """What a sidecar that only answers says, by method and path; a callable is asked with the body."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.by_call: dict[str, Any] = {
            "POST /v1/resume": (202, {"state": "none"}),
            "GET /v1/resume": (200, {"state": "none"}),
            "POST /v1/flush": (200, {"durable": []}),
            "POST /v1/room": (200, {"free_bytes": 0, "deleted": []}),
            "GET /v1/status": (200, {"degraded": False}),
            "GET /v1/checkpoints": (200, {"checkpoints": []}),
        }
        self.url = ""

    @property
    def settings(self) -> dict[str, str]:
        return {"CKPT_SIDECAR_URL": self.url}


@contextmanager
def answering() -> Iterator[Answers]:
    """Serve answers on a local port."""
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = json.loads(body) if body else None
            path = self.path.split("?")[0]
            answers.asked.append((f"{self.command} {path}", self.headers.get("authorization") or "", asked))
            answer = answers.by_call[f"{self.command} {path}"]
            if callable(answer):
                answer = answer(asked)
            if isinstance(answer, bytes):
                self.wfile.write(answer)
                return
            status, content = answer
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = _answer  # noqa: N815 - the names that http.server looks for

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        answers.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield answers
        finally:
            server.shutdown()
            thread.join()
