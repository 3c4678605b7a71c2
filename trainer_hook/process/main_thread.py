"""Has the main thread do what no other thread may: Python lets that one alone change how a signal is handled.

Each interpreter under the hook begins by taking a signal that nobody sends (a real-time one). Where a library is imported
later in a thread, while the main thread waits, that signal interrupts the wait, and its handler does what was asked for.
"""

# Every Python in the container imports this module: ``signal`` would bring enum, and threading as much again.
import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_asked: "list[Callable[[], None]]" = []


def listen() -> None:
    """Be ready from now on. In the main thread, at the interpreter's start; elsewhere, or where it is taken, do nothing."""
    try:
        if _signal.getsignal(_number()) == _signal.SIG_DFL:
            _signal.signal(_number(), _answer)
    except (AttributeError, OSError, ValueError):  # another system, a subinterpreter
        return


def ask(then: "Callable[[], None]") -> bool:
    """Have the main thread call ``then`` as soon as it runs Python or waits. Returns whether it is ready to: else never.

    ``then`` may come between any two bytecodes: it must neither import nor wait for a lock that the main thread may hold.
    """
    import threading

    main = threading.main_thread().ident
    if main is None or _signal.getsignal(_number()) is not _answer:
        return False
    _asked.append(then)
    try:
        _signal.pthread_kill(main, _number())
    except OSError:  # it has ended
        return False
    return True


def _answer(number: int, frame: object) -> None:
    while _asked:
        _asked.pop(0)()


def _number() -> int:
    return _signal.SIGRTMAX - 6 if os.name == "posix" else -1
