"""Builds the sidecar's image from this working copy: ``python -m tests.cluster.image [NAME:TAG]``.

``BASE_IMAGE`` as for the image tests; wheels come from this machine's pip.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from examples.demo.compose import call
from tests.deploy.containers import building


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else building.IMAGES["SIDECAR_IMAGE"]
    with tempfile.TemporaryDirectory() as folder:
        building.fetch_wheels(Path(folder), trainer=False)
        with building.serve(Path(folder)) as url:
            arguments = {"BASE_IMAGE": building.BASE, "PIP_FIND_LINKS": url, "PIP_NO_INDEX": "1"}
            given = [part for item in arguments.items() for part in ("--build-arg", "=".join(item))]
            command = ["docker", "build", "--quiet", "--network=host", "-f", "Dockerfile.sidecar", "-t", name, *given, "."]
            call(command, timeout_s=900)
    print(name)


if __name__ == "__main__":
    main()
