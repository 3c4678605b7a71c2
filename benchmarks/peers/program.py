"""What the programs have in common: their arguments, their files and keys, and saying that something is not installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cost import NOT_INSTALLED

UNSIGNED: dict[str, Any] = {
    "s3": {"payload_signing_enabled": False},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""botocore's fastest settings: no SHA-256 and no CRC of what is sent."""


@dataclass(frozen=True)
class Transfer:
    """All files of a folder, up to keys below a prefix or down from there."""

    endpoint: str
    bucket: str
    prefix: str
    folder: Path

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def uploads(self) -> list[tuple[Path, str]]:
        """Return files and their keys."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [(path, f"{self.prefix}/{path.relative_to(self.folder).as_posix()}") for path in files]

    def target(self, key: str) -> Path:
        """Return the path that a key is downloaded to; its folder is made."""
        path = self.folder / key.removeprefix(f"{self.prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def main(up: Callable[[Transfer], None], down: Callable[[Transfer], None]) -> None:
    """Be the program: ``up|down ENDPOINT BUCKET KEYPREFIX DIR``."""
    direction, endpoint, bucket, prefix, folder = sys.argv[1:]
    try:
        {"up": up, "down": down}[direction](Transfer(endpoint, bucket, prefix, Path(folder)))
    except ModuleNotFoundError as missing:
        _not_installed(str(missing.name))


def become(program: str, *arguments: str, **environ: str) -> NoReturn:
    """Be another program from now on: one of this virtual environment, or of the system."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(program, path=beside) or shutil.which(program)
    if not found:
        _not_installed(program)
    os.execve(found, [program, *arguments], os.environ | environ)


def _not_installed(what: str) -> NoReturn:
    print(f"not installed: {what}")
    sys.exit(NOT_INSTALLED)
