"""Imports modules once and forks a process for each command: ``fork_server.py SOCKET MODULE...``.

A connection to the Unix socket carries one JSON object a line: ``id``, ``argv`` (``["-m", module, ...]`` or ``[script, ...]``),
``environ``, ``folder`` and ``log``. Two more may be given: ``network``, the file of a network namespace, and
``ends_with_client``, with which the process is killed when the connection ends. Answers are ``{"id", "pid"}`` after the fork
and ``{"id", "code"}`` after the end. The forked process differs from a fresh interpreter in one thing: the modules are already
imported. If the hook is active, it patches them at once.
The command returns once the server listens in the background. The server ends with the last of its connections.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path

_MOST_BYTES = 1 << 20
_FIRST_S = 5.0
_CLONE_NEWNET = 0x40000000
"""Longest time without a client."""


def enter(network):
    """Move this process to a network namespace."""
    descriptor = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {network}")
    os.close(descriptor)


def patch_imported():
    """Have the hook, if it is active, patch what is already imported, as it does after an import."""
    boot = sys.modules.get("trainer_hook.activation.boot")
    if boot is not None and any(type(finder) is boot._Finder for finder in sys.meta_path):
        for name, (patching, function) in boot._PATCHES.items():
            if name in sys.modules:
                getattr(importlib.import_module(f"trainer_hook.{patching}"), function)(sys.modules[name])


def become(told):
    """Make this forked process the one that was asked for."""
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.close(log)
    if (network := told.get("network")) and not Path(network).samefile("/proc/self/ns/net"):
        enter(network)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    gc.enable()
    sys.path[:0] = paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for hook in [found for path in paths if (found := Path(path) / "sitecustomize.py").exists()][:1]:
        runpy.run_path(str(hook))
    patch_imported()
    if told["argv"][0] == "-m":
        sys.argv[:] = told["argv"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = told["argv"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


class Client:
    """One connection: a process of the test run."""

    def __init__(self, connection):
        self.connection = connection
        self.bound = set()
        """Pids of the processes that end with it."""
        self._buffer = b""

    def requests(self):
        """Return the requests that have arrived; ``None`` once the client has gone."""
        try:
            read = self.connection.recv(_MOST_BYTES)
        except ConnectionResetError:
            return None
        if not read:
            return None
        *lines, self._buffer = (self._buffer + read).split(b"\n")
        return [json.loads(line) for line in lines]

    def answer(self, told):
        with contextlib.suppress(OSError):  # it has gone
            self.connection.sendall((json.dumps(told) + "\n").encode())


class Server:
    def __init__(self, path):
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._clients = 0

    def serve(self):
        """Return the request that this process, a forked one, is to become; ``None`` in the server, at its end."""
        while self._clients or not self._has_ended():
            for key, _ in self._selector.select():
                told = key.data()
                if told is not None:
                    return told
        return None

    def _has_ended(self):
        """Whether no client has come, and none will: who finds no socket starts a server."""
        if self._selector.select(_FIRST_S):
            return False
        if self._path is None:
            return True
        Path(self._path).unlink(missing_ok=True)
        self._path = None
        return not self._selector.select(0)

    def _accept(self):
        client = Client(self._listener.accept()[0])
        self._clients += 1
        self._selector.register(client.connection, selectors.EVENT_READ, functools.partial(self._read, client))

    def _read(self, client):
        requests = client.requests()
        if requests is None:
            self._selector.unregister(client.connection)
            client.connection.close()
            self._clients -= 1
            for pid in client.bound:
                os.kill(pid, signal.SIGKILL)  # not reaped yet: the number is its own
            return None
        for told in requests:
            pid = os.fork()
            if pid == 0:
                self._close()
                return told
            if told.get("ends_with_client"):
                client.bound.add(pid)
            descriptor = os.pidfd_open(pid)
            reap = functools.partial(self._reap, client, told["id"], pid, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, reap)
            client.answer({"id": told["id"], "pid": pid})
        return None

    def _reap(self, client, id, pid, descriptor):
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        client.bound.discard(pid)
        client.answer({"id": id, "code": os.waitstatus_to_exitcode(status)})

    def _close(self):
        """Close all that a forked process must not hold."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()
        self._selector.close()


def main():
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared with the forked processes stays untouched
    gc.disable()
    server = Server(sys.argv[1])
    if os.fork():
        os._exit(0)
    return server.serve()


if __name__ == "__main__" and (of_child := main()) is not None:
    become(of_child)
