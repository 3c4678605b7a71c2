"""Run by every Python with this folder on its PYTHONPATH. Runs the next sitecustomize on the path, too.

It is in ``trainer_hook/activation/inject``, or alone in a folder made by ``checkpoint-sidecar install-hook``.
"""

import os
import sys


def _checkpoint_hook() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs 5 ms in every interpreter
    wanted = os.environ.get("CKPT_HOOK", "").strip()
    if wanted == "auto":
        try:
            _activate(_root(here))
        except Exception as error:
            _warn(f"the hook is off: {type(error).__name__}: {error}")
    elif wanted.lower() not in ("", "0", "false", "no", "off"):
        _warn(f"the hook is off: CKPT_HOOK={wanted!r} must be auto, or off")
    _run_next(here)


def _root(here: str) -> str:
    installed = os.path.join(here, "trainer_hook-current")  # noqa: PTH118
    # Resolved once: a later install applies to interpreters that start later.
    return os.path.realpath(installed) if os.path.isdir(installed) else os.path.abspath(os.path.join(here, "../../.."))  # noqa: PTH100, PTH112, PTH118


def _activate(root: str) -> None:
    added = [] if root in sys.path else [root]
    sys.path[:0] = added
    try:
        from trainer_hook.activation.boot import activate
    finally:
        del sys.path[: len(added)]
    activate()


def _warn(text: str) -> None:
    try:
        sys.stderr.write(f"[checkpoint] WARNING: {text}\n")
    except Exception:  # no stream, or a closed one: start all the same
        return


def _run_next(here: str) -> None:
    import importlib.machinery

    paths = [os.path.abspath(path or ".") for path in sys.path]  # noqa: PTH100
    # Only later folders: two copies of this file would find each other.
    behind = sys.path[len(paths) - paths[::-1].index(here) :] if here in paths else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_checkpoint_hook()
