"""Termination notice: SIGTERM, also while the main thread runs C code, or the file ``.ckpt/terminating``.

The kubelet signals PID 1 of each container. Python runs a handler only between bytecodes of the main thread, so a thread
reads the signal from the wakeup descriptor at once. Many launchers do not forward the signal; for them a preStop hook or the
sidecar writes the file.
"""

from __future__ import annotations

import contextlib
import functools
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

from trainer_hook import contract
from trainer_hook.process import main_thread
from trainer_hook.process.fork_mask import ForkMask
from trainer_hook.process.log import warn
from trainer_hook.process.native_handler import NativeHandler
from trainer_hook.process.pid_one import default_action
from trainer_hook.process.system_exit import exit_with, has_script_ended, kept, soon, watched
from trainer_hook.process.trainers_below import is_below_trainer, ranks_below, wait_for_trainers
from trainer_hook.volume.publish import publish

_POLL_S = 0.5
_MAIN_THREAD_TIMEOUT_S = 2.0
"""Longest wait of a thread that imports a library until the main thread has installed the handler."""
_IDLE_EXIT_S = 5.0
"""After SIGTERM a process that is not training is ended if it has not exited by then."""


_listening: set[int] = set()
"""Processes that have a ``StopSignal`` of their own, this one and those that it was forked from."""


def process_start_s() -> float:
    """Return the start time of this process in epoch seconds; the current time without ``/proc``."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


class StopSignal:
    """Whether this process has a termination notice. One per process; install it once."""

    def __init__(self, volume: Path, *, exit_code: int, grace_s: float = 30.0) -> None:
        self._volume = volume
        self._exit_code = exit_code
        self._grace_s = grace_s
        self._previous: Any = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._over: tuple[Any, Any] | None = None
        """While this handler has replaced one that the script installed later: that one, and the ``_previous`` of before."""
        self._calls_theirs = False
        self._native = NativeHandler()
        self.suppressed: BaseException | None = None
        """Exception of a handler of the script during training. It is raised after the save; ``None``: there is none."""
        self._is_postponed = False
        """A signal came during training, and the script has no handler: it has its usual effect after training."""
        self.is_training = False
        """A signal is only recorded, for ``noticed()`` at the end of a step; otherwise it ends the process."""
        self._has_handled = False
        """The handler has run outside training."""
        self._wakeup_fd = -1
        self._pid = os.getpid()
        self._started_s = process_start_s()
        self._polled_s = 0.0
        self._was_absent = False
        """An earlier poll found no ``.ckpt/terminating``: a later file is new, even if the clock was set back."""
        self._notice: bytes | None = None
        """Content of ``.ckpt/terminating`` that is still to be written."""
        self.notice_at_s: float | None = None
        """Monotonic time of the first notice; ``None``: there is none."""
        self.on_notice: Callable[[], None] = lambda: None
        """Called once, at the first notice, in any thread or in a signal handler."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called in the handler if a signal cuts the interpreter's exit short: its ``atexit`` functions do not run then."""

    def install(self) -> None:
        """Begin to listen. The previous handler still runs; forked children have it alone."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._sockets = (reader, writer)
        _listening.add(os.getpid())
        os.register_at_fork(after_in_child=self._uninstall)
        ForkMask().install()
        self._in_main_thread(self._take_signal)
        start_thread(threading.Thread(target=self._read_signals, args=(reader,), name="checkpoint-signal", daemon=True))

    def install_again(self) -> None:
        """Replace a handler that was installed after this one."""
        self._in_main_thread(self._set_handler)

    def defer(self) -> None:
        """Training begins: a signal is only recorded, also where the script has installed a handler over this one."""
        self.is_training = True
        _ask_main_thread(self._take_over)

    def end_deferral(self) -> None:
        """Training has ended: from now on a signal has its usual effect, or that of the script's handler."""
        self.on_notice = lambda: None
        self.is_training = False
        _ask_main_thread(self._hand_back)

    @property
    def is_due(self) -> bool:
        """Whether a signal during training still has to have its usual effect, or that of the script's handler."""
        return self.suppressed is not None or self._is_postponed

    def catch_up(self) -> None:
        """Let a signal during training have its usual effect, or that of the script's handler. After ``end_deferral``."""
        if self.suppressed is not None:
            _ask_main_thread(functools.partial(_raise, self.suppressed))
        elif self._is_postponed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _set_handler(self) -> Any:
        previous = signal.signal(signal.SIGTERM, self._handle)
        self._native.see_pythons()
        return previous

    def _take_over(self) -> None:
        self._take_wakeup()
        self._native.take_place()
        theirs = signal.getsignal(signal.SIGTERM)
        if self._sockets is not None and theirs is not None and theirs != self._handle:
            self._over, self._previous = (theirs, self._previous), theirs
            self._set_handler()

    def _hand_back(self) -> None:
        if self._over is not None:
            (theirs, self._previous), self._over = self._over, None
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, theirs)
        self._native.give_back()

    def _in_main_thread(self, then: Callable[[], object]) -> bool:
        """Run a function in the main thread, which alone can change signal handlers. Returns whether it has run."""
        if threading.current_thread() is threading.main_thread():
            then()
            return True
        done = threading.Event()

        def do() -> None:
            then()
            done.set()

        if main_thread.ask(do) and done.wait(_MAIN_THREAD_TIMEOUT_S):
            return True
        warn("the library was imported in a thread while the main thread is busy: only .ckpt/terminating is sure to be heard")
        return False

    def end_main_thread(self) -> None:
        """End the process from another thread, where ``SystemExit`` would end only that thread."""

        def end() -> None:
            raise watched(exit_with(self._exit_code), dropped=functools.partial(soon, self.end_main_thread))

        if threading.main_thread().is_alive():
            main_thread.ask(end)

    def _take_signal(self) -> None:
        previous = self._set_handler()
        self._previous = signal.SIG_DFL if previous is default_action else previous
        self._take_wakeup()

    def _take_wakeup(self) -> None:
        if self._sockets is None:
            return
        ours = self._sockets[1].fileno()
        theirs = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if theirs in (-1, ours):  # -1 also after an event loop of the script, which leaves none behind
            self._wakeup_fd = ours
        else:  # of an event loop that runs: until it is closed only the plain handler is used
            signal.set_wakeup_fd(theirs)

    def _read_signals(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            if signal.SIGTERM in numbers:
                self._notice_signal()
                if not self.is_training and not callable(self._previous) and not ranks_below():
                    self._end_soon()

    def _end_soon(self) -> None:
        self.wait_for_trainers(tell=False)
        # The handler never runs while the main thread waits in C code for other ranks. No timer: since Python 3.12 no thread
        # can be started at the interpreter's exit.
        time.sleep(_IDLE_EXIT_S / 2)
        handled: list[bool] = []
        main_thread.ask(lambda: handled.append(self._has_handled))
        time.sleep(_IDLE_EXIT_S / 2)
        if not self._script_decides(handled):
            os._exit(self._exit_code)

    def _script_decides(self, handled: list[bool]) -> bool:
        """Whether the signal was for a handler that the script has installed over this one.

        ``handled``: whether this one had run when the main thread ran Python code again; empty: it did not.
        """
        return not self._has_handled and (False in handled or signal.getsignal(signal.SIGTERM) != self._handle)

    def _uninstall(self) -> None:
        # The child shares the descriptor: its signal must not reach the parent's thread.
        if self._wakeup_fd != -1 and (theirs := signal.set_wakeup_fd(-1)) not in (-1, self._wakeup_fd):
            signal.set_wakeup_fd(theirs)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(number, frame)
            return
        self._notice_signal()
        self._native.call()
        if self.is_training:
            # DataLoader workers get the signal to the group, too; their end must not raise an exception during a save.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            self._has_handled = True
            self._write_notice()
        if callable(self._previous):
            self._call_theirs(number, frame)
        elif self.is_training:
            self._is_postponed = True
        else:
            is_exiting = has_script_ended(frame)
            self.wait_for_trainers(tell=True, ranks=is_exiting)
            if is_exiting:  # the interpreter would report an exception, ignore it, and end with the script's exit code
                self._end_exit()
            raise kept(exit_with(self._exit_code))

    def _handle_in_child(self, number: int, frame: FrameType | None) -> None:
        # Called by a handler that the script installed later, and which expects the earlier handler to end the process.
        below = self._previous if self._over is None else self._over[1]
        if callable(below):
            below(number, frame)
        elif os.getpid() in _listening:
            raise kept(exit_with(self._exit_code))
        elif below != signal.SIG_IGN:
            default_action(number, frame)

    def _end_exit(self) -> NoReturn:
        try:
            self.before_exit()
        finally:
            exit_now(self._exit_code)

    def _call_theirs(self, number: int, frame: FrameType | None) -> None:
        if self._calls_theirs:  # theirs calls the handler that it replaced, this one
            return
        self._calls_theirs = True
        try:
            self._previous(number, frame)
        except BaseException as error:
            if not self.is_training:
                raise
            self.suppressed = error
        finally:
            self._calls_theirs = False

    def _set_noticed(self) -> None:
        # No lock: this also runs in a signal handler, which may have interrupted itself.
        if self.notice_at_s is None:
            self.notice_at_s = time.monotonic()
            self.on_notice()

    def _notice_signal(self) -> None:
        if self.notice_at_s is None:
            self._notice = contract.encode_notice(contract.Notice(contract.rfc3339(time.time()), "sigterm"))
            try:
                self._set_noticed()  # before the volume, which may hang
            finally:
                self._write_notice()

    def _write_notice(self) -> None:
        # Thread and handler may both write the same content: the first one may be interrupted by the exit of the process.
        if (notice := self._notice) is not None:
            if self.is_training or not is_below_trainer(self._volume):
                for content in (notice, b""):  # after an error, such as of a full volume: an empty file is a notice, too
                    with contextlib.suppress(OSError):
                        publish(self._volume / contract.TERMINATING, content)
                        break
            self._notice = None

    def wait_for_trainers(self, *, tell: bool, ranks: bool = False) -> None:
        """Wait for training processes below this one, at most until the grace period ends. The end of this one may kill them.

        ``subprocess.run`` kills its child, and the kernel kills all processes of a container when PID 1 ends. The interpreter's
        exit waits for children of multiprocessing, so ``ranks`` says whether to wait for those here, too. ``tell``: send
        SIGTERM to the processes.
        """
        self._notice_signal()
        if self.notice_at_s is not None:
            wait_for_trainers(self._volume, until_s=self.notice_at_s + self._grace_s, tell=tell, ranks=ranks)

    def left_s(self) -> float:
        """Return the seconds until the process is killed; the whole grace period before a termination notice."""
        return self._grace_s - (0.0 if self.notice_at_s is None else time.monotonic() - self.notice_at_s)

    @contextlib.contextmanager
    def training(self) -> Any:
        """Surround training: a signal is only recorded instead of ending the process."""
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False

    def noticed(self) -> bool:
        """Whether there is a termination notice. Reads the volume at most twice a second."""
        now_s = time.monotonic()
        if self.notice_at_s is None and now_s - self._polled_s >= _POLL_S:
            self._polled_s = now_s
            self._read_notice()
            # A library may have installed a handler since. Only then the main thread is asked: that interrupts system calls.
            if self.is_training and self._native.is_in_place:
                _ask_main_thread(self._native.take_place)
        return self.notice_at_s is not None

    def _read_notice(self) -> None:
        path = self._volume / contract.TERMINATING
        try:
            notice, written_s = contract.parse_notice(path.read_bytes()), path.stat().st_mtime
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                self._was_absent |= path.parent.is_dir()  # not a volume that is away
            return
        except OSError:
            return
        # An older notice was for an earlier process.
        if self._was_absent or (contract.epoch_seconds(notice.at) if notice.at else written_s) >= self._started_s:
            self._set_noticed()


def _ask_main_thread(then: Callable[[], None]) -> None:
    """Run a function in the main thread, which alone can change signal handlers: at once there, else as soon as it can."""
    if threading.current_thread() is threading.main_thread():
        then()
    else:
        main_thread.ask(then)


def _raise(error: BaseException) -> NoReturn:
    raise error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, except where Python refuses it: since 3.12 at the interpreter's exit. Signal handlers still run."""
    with contextlib.suppress(RuntimeError):
        thread.start()


def exit_within(code: int, *, within_s: float) -> None:
    """End the process with ``code`` after ``within_s``, even if the interpreter's exit hangs."""
    timer = threading.Timer(within_s, os._exit, (code,))
    timer.daemon = True
    start_thread(timer)


def exit_now(code: int) -> NoReturn:
    """End the process at once, without the interpreter's exit."""
    with contextlib.suppress(Exception):  # no stream, a closed one, or one that a signal handler has interrupted in a write
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
