"""``checkpoint-sidecar run``: the sidecar itself, from the settings to the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from sidecar.cli.missing_package import not_installed
from sidecar.cli.output import fail
from sidecar.core.lifecycle.exit_codes import EXIT_CONFIGURATION, EXIT_FAILED
from sidecar.daemon import termination_message
from sidecar.daemon.settings import Settings, from_environment
from sidecar.errors import ConfigurationError


def run() -> int:
    """Run until the daemon ends, and end the process with its exit code. Returns only when a setting is wrong."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        settings = from_environment(os.environ, mountinfo=mountinfo, hostname=socket.gethostname())
    except ConfigurationError as error:
        return _misconfigured(f": {error}")
    asyncio.run(_life(settings))
    raise AssertionError("a life ends with the process")


def _misconfigured(text: str) -> int:
    """Say in one line what must be changed, also to Kubernetes. Returns the exit code."""
    termination_message.write(text.removeprefix(":").strip())
    return fail(text, EXIT_CONFIGURATION)


async def _life(settings: Settings) -> NoReturn:
    # Neither the event loop is closed nor the interpreter ended: both wait for every thread, also for one that is inside
    # a request to a dead store or a call to a volume that hangs, and kubelet's patience ends first.
    from sidecar.daemon.daemon import Daemon
    from sidecar.daemon.logging import configure
    from sidecar.errors import StoreError
    from sidecar.store.opening import open_from

    code = EXIT_FAILED
    try:
        configure(settings.log)
        store = open_from(settings)
        code = await Daemon(settings, store).run()
        store.close()
    except (ConfigurationError, StoreError) as error:
        code = _misconfigured(f": {error}")
    except ModuleNotFoundError as error:
        code = _misconfigured(f" run: {not_installed(error)}")
    except BaseException as error:
        traceback.print_exc()
        termination_message.write(f"a bug, see the log: {type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()  # the log is not buffered
        os._exit(code)
