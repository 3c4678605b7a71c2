"""Runs functions in the main thread, which alone may change signal handlers.

Each interpreter under the hook installs a handler for an unused real-time signal at its start. Where a library is imported
later in another thread while the main thread waits, that signal interrupts the wait, and its handler runs the function.
"""

# Every Python in the container imports this module: ``signal`` would bring enum, and threading as much again.
import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_asked: "list[Callable[[], None]]" = []


def listen() -> None:
    """Install the handler, in the main thread at the interpreter's start. No effect elsewhere, or if the signal is in use."""
    try:
        if _signal.getsignal(_number()) == _signal.SIG_DFL:
            _signal.signal(_number(), _answer)
            os.register_at_fork(after_in_child=_asked.clear)  # they are for this process
    except (AttributeError, OSError, ValueError):  # another system, a subinterpreter
        return


def ask(then: "Callable[[], None]") -> bool:
    """Have the main thread call ``then`` soon. Returns false if it never will.

    ``then`` runs between any two bytecodes: it must neither import nor wait for a lock that the main thread may hold. One that
    still waits for the main thread to leave C code is not added again.
    """
    import threading

    main = threading.main_thread().ident
    if main is None or _signal.getsignal(_number()) is not _answer:
        return False
    if then in _asked:
        return True
    _asked.append(then)
    try:
        _signal.pthread_kill(main, _number())
    except OSError:  # the thread has ended, or the kernel queues no more signals (RLIMIT_SIGPENDING): the next call asks again
        if then in _asked:
            _asked.remove(then)
        return False
    return True


def _answer(number: int, frame: object) -> None:
    try:
        while _asked:
            _asked.pop(0)()
    finally:
        if _asked:  # one has raised, or another handler here: for several signals Python may call this one once
            _signal.raise_signal(number)


def _number() -> int:
    return _signal.SIGRTMAX - 6 if os.name == "posix" else -1
