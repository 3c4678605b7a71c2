"""``python -m examples.demo``, which ``make demo`` runs in the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from examples.demo.timeline import complain

_NEEDED = ("boto3", "pydantic", "fastapi", "transformers", "accelerate", "torch")
"""What the processes of the demo import: without one of them they would end in a traceback of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit code: 0 only if nothing was lost and the weights are bit-identical."""
    options = _options(arguments)
    for package in (*_NEEDED, *(["moto"] if options.store == "s3" else [])):
        if find_spec(package) is None:
            complain(f"the package {package} is not installed: pip install 'checkpoint-sidecar[demo]'")
            return 2

    from examples.demo.scenario import run

    return run(kind=options.store, script=options.script, folder=options.folder.resolve(), as_json=options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=sys.modules["examples.demo"].__doc__)
    parser.add_argument("--store", choices=["s3", "file"], default="s3", help="an S3 server in memory, or a folder")
    parser.add_argument("--script", type=Path, default=Path("examples/train_hf.py"), metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), metavar="DIR", help="emptied first")
    parser.add_argument("--json", action="store_true", help="also print the result as one line of JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
