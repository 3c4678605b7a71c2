"""Learns that the pod is going: from SIGTERM, also while the main thread is deep in C code, or from a file on the volume.

Who gets SIGTERM when: the kubelet signals PID 1 of each container. Python runs a handler only between bytecodes of the main
thread, so a thread of ours reads the signal from the wakeup descriptor at once. Many launchers pass no signal on at all;
for them there is the file ``.ckpt/terminating``, which a preStop hook or the sidecar writes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trainer_hook.contract import (
    ANSWER,
    REQUEST,
    TERMINATING,
    Answer,
    ContractError,
    Notice,
    Request,
    encode_answer,
    encode_notice,
    epoch_seconds,
    parse_notice,
    parse_request,
    rfc3339,
)
from trainer_hook.process import main_thread
from trainer_hook.process.log import warn
from trainer_hook.process.pid_one import default_action
from trainer_hook.volume.publish import publish

_POLL_S = 0.5
_MAIN_THREAD_TIMEOUT_S = 2.0
"""How long a thread that imports a library waits for the main thread to take the signal."""
_IDLE_EXIT_S = 5.0
"""How long a process that is not training has to end by itself after SIGTERM."""


def process_start_s() -> float:
    """Return when this process was started, in epoch seconds; now where ``/proc`` does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


class StopSignal:
    """Whether this process was told to end. One per process; install it once."""

    def __init__(self, volume: Path, *, exit_code: int) -> None:
        self._volume = volume
        self._exit_code = exit_code
        self._previous: Any = None
        self._training = False
        self._wakeup_fd = -1
        self._masks: dict[int, set[int | signal.Signals]] = {}
        """What threads that are forking had blocked before, by their identity."""
        self._pid = os.getpid()
        self._born_s = process_start_s()
        self._looked_s = 0.0
        self._notice: bytes | None = None
        """What the volume is still to be told."""
        self.notice_at_s: float | None = None
        """Monotonic instant of the first notice."""
        self.on_notice: Callable[[], None] = lambda: None
        """Called once, with the first notice, in any thread or in a signal handler."""

    def install(self) -> None:
        """Begin to listen. The previous handler still runs; forked children get it back."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._sockets = (reader, writer)
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._forget)
        os.register_at_fork(after_in_child=self._let_go)  # also if forgetting went wrong
        if not self._in_main_thread(self._take_signal) or self._wakeup_fd != -1:  # what is not done yet may still be
            threading.Thread(target=self._read, args=(reader,), name="checkpoint-signal", daemon=True).start()

    def install_again(self) -> None:
        """Take the signal back from a handler that was put over ours."""
        self._in_main_thread(lambda: signal.signal(signal.SIGTERM, self._handle))

    def _in_main_thread(self, then: Callable[[], object]) -> bool:
        """Have something done where signals can be changed. Returns whether it is done."""
        if threading.current_thread() is threading.main_thread():
            then()
            return True
        done = threading.Event()

        def do() -> None:
            then()
            done.set()

        if main_thread.ask(do) and done.wait(_MAIN_THREAD_TIMEOUT_S):
            return True
        warn("the library was imported in a thread and the main thread is busy: only .ckpt/terminating is sure to be heard")
        return False

    def end_main_thread(self) -> None:
        """End the process from a thread, where ``SystemExit`` would end the thread alone and the script would go on."""

        def end() -> None:
            raise SystemExit(self._exit_code)

        if threading.main_thread().is_alive():
            main_thread.ask(end)

    def _take_signal(self) -> None:
        previous = signal.signal(signal.SIGTERM, self._handle)
        self._previous = signal.SIG_DFL if previous is default_action else previous
        writer = self._sockets[1]
        theirs = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if theirs != -1:  # an event loop of the script's own: the plain handler has to do
            signal.set_wakeup_fd(theirs)
            return
        self._wakeup_fd = writer.fileno()

    def _read(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            if signal.SIGTERM in numbers:
                self._told_by_signal()
                if not self._training and not callable(self._previous) and not _ranks_below():
                    # The main thread may be waiting in C code for other ranks: its handler would never run.
                    exit_within(self._exit_code, within_s=_IDLE_EXIT_S)

    def _hold(self) -> None:
        # What a child got before it has forgotten us, the interpreter would drop, and whoever ended it would wait for ever.
        self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        if (mask := self._masks.pop(threading.get_ident(), None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _forget(self) -> None:
        # The descriptor is shared with the parent: a signal to the child must not reach the parent's thread.
        if self._wakeup_fd != -1 and (theirs := signal.set_wakeup_fd(-1)) not in (-1, self._wakeup_fd):
            signal.set_wakeup_fd(theirs)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        self._told_by_signal()
        if self._training:
            # DataLoader workers get the group's signal, too; their death must not raise in the middle of a save.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            self._tell_volume()
        if callable(self._previous):
            try:
                self._previous(number, frame)
            except SystemExit:
                if not self._training:
                    raise
        elif not self._training:
            if _only_threads_are_left():  # the interpreter would ignore an exception
                exit_now(self._exit_code)
            raise SystemExit(self._exit_code)

    def _told(self) -> None:
        # No lock: this also runs in a signal handler, which may have interrupted itself.
        if self.notice_at_s is None:
            self.notice_at_s = time.monotonic()
            self.on_notice()

    def _told_by_signal(self) -> None:
        if self.notice_at_s is None:
            self._notice = encode_notice(Notice(rfc3339(time.time()), "sigterm"))
            self._told()
            self._tell_volume()

    def _tell_volume(self) -> None:
        # Also by who comes second and ends the process: the other one may still be at it. Twice the same does no harm.
        if (notice := self._notice) is not None:
            with contextlib.suppress(OSError):
                publish(self._volume / TERMINATING, notice)
            self._notice = None

    @property
    def is_training(self) -> bool:
        """Whether a signal waits for the end of a step."""
        return self._training

    def begin_training(self) -> None:
        """From now on a signal is only recorded, for ``noticed()``."""
        self._training = True

    def end_training(self) -> None:
        """From now on a signal ends the process again."""
        self._training = False

    @contextlib.contextmanager
    def training(self) -> Any:
        """While training, a signal waits for the end of the step instead of ending the process."""
        self.begin_training()
        try:
            yield
        finally:
            self.end_training()

    def noticed(self) -> bool:
        """Whether the pod is going. Looks at the volume at most twice a second."""
        if self.notice_at_s is None and self._due():
            self._look()
        return self.notice_at_s is not None

    def _due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_s < _POLL_S:
            return False
        self._looked_s = now_s
        return True

    def _look(self) -> None:
        path = self._volume / TERMINATING
        try:
            notice, written_s = parse_notice(path.read_bytes()), path.stat().st_mtime
        except OSError:
            return
        # A notice from before this process was born was for an earlier one.
        if (epoch_seconds(notice.at) if notice.at else written_s) >= self._born_s:
            self._told()


def _only_threads_are_left() -> bool:
    """Whether the script's main thread has ended and the interpreter waits for others."""
    main = threading.main_thread()
    return not main.is_alive() and any(thread is not main and not thread.daemon for thread in threading.enumerate())


def _ranks_below() -> bool:
    """Whether multiprocessing has children that the interpreter's exit waits for, such as ranks that save just in time."""
    process = sys.modules.get("multiprocessing.process")
    children = list(process._children) if process is not None else []
    # Not is_alive(): it reaps, and the main thread may be waiting for the same child.
    return any(not child.daemon and getattr(child._popen, "returncode", 0) is None for child in children)


class SaveRequests:
    """What the sidecar asks of the trainer through ``.ckpt/request.json``, and the answer. Looked at about once a second."""

    def __init__(self, volume: Path) -> None:
        self._path = volume / REQUEST
        self._answer_path = volume / ANSWER
        self._looked_s = 0.0
        self._seen = self._read()
        self._open: Request | None = None

    def poll(self) -> Request | None:
        """Return a request that was not seen before."""
        now_s = time.monotonic()
        if now_s - self._looked_s < 2 * _POLL_S:
            return None
        self._looked_s = now_s
        return self.take()

    def take(self) -> Request | None:
        """Look now: a save that the ranks have agreed on answers what was asked until then, whichever of them saw it."""
        request = self._read()
        if request is None or (self._seen is not None and request.id == self._seen.id):
            return None
        self._seen = self._open = request
        return request

    def answer(self, name: str, *, saved: bool) -> None:
        """Tell the sidecar what became of the request that was taken, if one was. A full disk does not matter here."""
        asked, self._open = self._open, None
        if asked is None:
            return
        answer = Answer(asked.id, "failed", None, "the trainer could not save; its log says why", rfc3339(time.time()))
        if saved:
            answer = Answer(asked.id, "saved", name, None, answer.at)
        with contextlib.suppress(OSError):
            publish(self._answer_path, encode_answer(answer))

    def _read(self) -> Request | None:
        try:
            return parse_request(self._path.read_bytes())
        except (OSError, ContractError):
            return None


def exit_within(code: int, *, within_s: float, before: Callable[[], None] = lambda: None) -> None:
    """End the process with ``code`` after ``within_s`` even if the interpreter's own exit hangs."""

    def end() -> None:
        before()
        os._exit(code)

    timer = threading.Timer(within_s, end)
    timer.daemon = True
    timer.start()


def exit_now(code: int) -> NoReturn:
    """End the process with an exit code that the interpreter would not use."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
