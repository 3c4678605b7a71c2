"""What pyproject.toml cannot say: on a package index the README's relative links lead to the repository, at this version."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURES = (".svg", ".png")


def description() -> str:
    """Return the README with absolute links."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    version = re.search(r'^__version__ = "([^"]+)"', (ROOT / "trainer_hook/__init__.py").read_text(), re.MULTILINE)
    assert version is not None

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1].partition("#")[0].endswith(PICTURES) else "blob"
        return f"]({source}/{kind}/v{version[1]}/{match[1]})"

    return re.sub(r"\]\((?!#|[a-z]+:)([^()\s]+)\)", absolute, (ROOT / "README.md").read_text())


setup(long_description=description(), long_description_content_type="text/markdown")
