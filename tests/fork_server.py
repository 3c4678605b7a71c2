"""Imports modules once and forks a process for each command: ``fork_server.py MODULE...``.

Standard input: one JSON object a line with ``id``, ``argv`` (``["-m", module, ...]`` or ``[script, ...]``), ``environ``,
``folder`` and ``log``. Standard output: ``{"id", "pid"}`` after the fork, ``{"id", "code"}`` after the end.
The forked process differs from a fresh interpreter in one thing: the modules are already imported.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import sys
from pathlib import Path

_MOST_BYTES = 1 << 20


def become(told):
    """Make this forked process the one that was asked for."""
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.close(log)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    gc.enable()
    sys.path[:0] = paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for hook in [found for path in paths if (found := Path(path) / "sitecustomize.py").exists()][:1]:
        runpy.run_path(str(hook))
    if told["argv"][0] == "-m":
        sys.argv[:] = told["argv"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = told["argv"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def say(told):
    os.write(1, (json.dumps(told) + "\n").encode())


def asked(selector, running):
    """Yield one request for each line of standard input. Report exit codes of forked processes meanwhile."""
    buffer = b""
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                os.close(key.fd)
                selector.unregister(key.fd)
                _, status = os.waitpid(running.pop(key.data), 0)
                say({"id": key.data, "code": os.waitstatus_to_exitcode(status)})
                continue
            read = os.read(0, _MOST_BYTES)
            if not read:
                return
            *lines, buffer = (buffer + read).split(b"\n")
            for line in lines:
                yield json.loads(line)


def main():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared with the forked processes stays untouched
    gc.disable()
    selector, running = selectors.DefaultSelector(), {}
    selector.register(0, selectors.EVENT_READ)
    for told in asked(selector, running):
        pid = os.fork()
        if pid == 0:
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
            selector.close()
            return told
        running[told["id"]] = pid
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, told["id"])
        say({"id": told["id"], "pid": pid})
    return None


if __name__ == "__main__" and (of_child := main()) is not None:
    become(of_child)
