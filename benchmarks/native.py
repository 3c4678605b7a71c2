"""The C programs of this folder, built when they are first needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-O2", "-lssl", "-lcrypto", "-lpthread")


def built(name: str) -> Path:
    """Return the program made of ``name.c``. It stays in the temporary folder until one of the sources changes.

    Raises:
        SystemExit: There is no compiler, or no OpenSSL to compile against.
    """
    sources = b"".join(path.read_bytes() for path in [HERE / f"{name}.c", *sorted(HERE.glob(f"{name}_*.h"))])
    folder = Path(tempfile.gettempdir(), f"checkpoint-sidecar-bench-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / f"{name}-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not program.exists():
        fresh = program.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run(
                ["gcc", str(HERE / f"{name}.c"), *FLAGS, "-o", str(fresh)], check=True, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise SystemExit("gcc is missing: apt-get install gcc libssl-dev") from None
        except subprocess.CalledProcessError as error:
            if "openssl/" in error.stderr or "-lssl" in error.stderr:
                raise SystemExit("the headers of OpenSSL are missing: apt-get install gcc libssl-dev") from None
            raise SystemExit(f"{name}.c does not compile:\n{error.stderr}") from None
        fresh.rename(program)
    return program
