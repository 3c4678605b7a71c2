"""The trainer's side: saves checkpoints, marks them as finished, resumes.

Requires only the standard library; a library's module imports that library.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - before any syntax that an older Python cannot compile
    _TOLD = f"trainer_hook needs Python 3.10 or newer; this is {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
    if sys.argv[:1] == ["-m"]:
        sys.stderr.write(_TOLD + "\n")
        raise SystemExit(2)
    raise ImportError(_TOLD)

__version__ = "0.1.0"

PACKAGE = "trainer_hook"
CURRENT = "trainer_hook-current"
"""Link in a folder of ``install-hook``: its target is the folder with the package."""
