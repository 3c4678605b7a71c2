"""Imports once what training scripts import, and forks a process for each that is asked for: ``forks.py MODULE...``.

A line of standard input tells one: its command, environment, folder and log. Two lines of standard output say its pid and,
at its end, its exit code. In the forked process the hook is activated and the script run as a fresh interpreter would.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

HOOKED = "transformers.trainer"
"""Not imported here: that is what activates the hook."""


def become(told):
    """Make this forked process the one that was asked for."""
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    sys.path[:0] = paths = os.environ["PYTHONPATH"].split(os.pathsep)
    for hook in [found for path in paths if (found := Path(path) / "sitecustomize.py").exists()][:1]:
        runpy.run_path(str(hook))
    sys.argv[:] = told["command"][1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert HOOKED not in sys.modules
    print("ready", flush=True)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


main()
