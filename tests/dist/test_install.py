"""What make installs with: uv, and pip where uv does not know the user's index or cannot reach its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.dist.conftest import PIP, ROOT, done, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("configured", "by_uv"),
    [({}, True), ({"PIP_EXTRA_INDEX_URL": "file:///"}, False), ({"UV_DEFAULT_INDEX": "http://127.0.0.1:1/", "UV_HTTP_RETRIES": "0"}, True)],
    ids=["by uv", "an index of one's own", "uv reaches no index"],
)
def test_a_package_is_installed(configured: dict[str, str], by_uv: bool, tmp_path: Path) -> None:
    done(sys.executable, "-m", "venv", tmp_path)
    own = run(*PIP[:3], "config", "get", "global.index-url").stdout.strip()
    python = tmp_path / "bin/python"
    done(python, ".ci/install", "-c", "constraints.txt", "idna", cwd=ROOT, env=os.environ | configured)
    done(python, "-c", "import idna", cwd=tmp_path)
    assert (tmp_path / "bin/uv").exists() is (by_uv and not own)
