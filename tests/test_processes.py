"""The tests' own look at other processes: one that ends meanwhile is no error."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.process.sidecar_process import until
from tests.processes import children_of, links_of, of_process, state_of


def test_a_process_that_has_ended_has_nothing_to_tell() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {"RANK": "7"}) as process:
        until(lambda: b"RANK=7" in of_process(process.pid, "environ").split(b"\0"))  # empty for a moment after exec
        assert process.pid in children_of(os.getpid())
        assert state_of(process.pid) in ("S", "R", "D")
        assert links_of(process.pid)
        process.kill()
        until(lambda: state_of(process.pid) is None)  # a zombie, that nobody has waited for
        for path in ("environ", "cmdline", f"task/{process.pid}/children"):
            assert of_process(process.pid, path) == b""
        process.wait()
        assert (of_process(process.pid, "environ"), children_of(process.pid), links_of(process.pid)) == (b"", [], {})
