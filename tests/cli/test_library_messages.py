"""Messages of libraries: a command tells its error in a line of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.servers import Proxy


def test_a_command_prints_no_stack_trace_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the token of a service account")
    service = Proxy(rule=lambda _: (200, {}, b"{}"))
    with service.running() as address:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "AWS_"))}
        environ |= {
            "AWS_S3_ENDPOINT": "http://127.0.0.1:1",
            "AWS_ENDPOINT_URL_STS": address,
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
        }
        environ |= {"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"), "AWS_EC2_METADATA_DISABLED": "true"}
        command = [sys.executable, "-m", "sidecar", "ls", "s3://bucket/run"]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode
    assert "no credentials" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "during mandatory refresh" not in ended.stderr
