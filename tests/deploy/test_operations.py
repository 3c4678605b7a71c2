from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import boto3
import pytest

from tests import servers

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "OPERATIONS.md").read_text()

# The AWS command line is no dependency: this does what the one command of it in the document does.
AWS = """#!{python}
import os, pathlib, sys, urllib.parse, boto3
assert sys.argv[1:4] == ["s3", "cp", "--recursive"], sys.argv
source, target = urllib.parse.urlparse(sys.argv[4]), pathlib.Path(sys.argv[5])
client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
prefix = source.path.strip("/") + "/"
for entry in client.list_objects_v2(Bucket=source.netloc, Prefix=prefix)["Contents"]:
    place = target / entry["Key"].removeprefix(prefix)
    place.parent.mkdir(parents=True, exist_ok=True)
    client.download_file(source.netloc, entry["Key"], str(place))
"""


@pytest.mark.slow
def test_the_migration_brings_a_foreign_checkpoint_to_a_prefix_from_which_a_run_resumes(
    tmp_path: Path, moto_endpoint: str
) -> None:
    bucket = f"old-{uuid.uuid4().hex[:12]}"
    servers.create_bucket(moto_endpoint, bucket)
    credentials = {"AWS_ACCESS_KEY_ID": servers.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY}
    client = boto3.client(
        "s3", endpoint_url=moto_endpoint, region_name=servers.REGION, **{k.lower(): v for k, v in credentials.items()}
    )
    files = {"trainer_state.json": b'{"global_step": 40}', "model/weights.safetensors": os.urandom(200_000)}
    for name, content in files.items():
        client.put_object(Bucket=bucket, Key=f"sdk/checkpoint-40/{name}", Body=content)
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {
        "aws": AWS.format(python=sys.executable),
        "checkpoint-sidecar": f'#!/bin/sh\nexec {sys.executable} -m sidecar "$@"\n',
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    [snippet] = re.findall(r"```bash\n(.*?)```", OPERATIONS, re.DOTALL)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CKPT_")},
        **credentials,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "AWS_ENDPOINT_URL": moto_endpoint,
        "AWS_DEFAULT_REGION": servers.REGION,
        "CKPT_API_PORT": "0",
        "TMPDIR": str(tmp_path),
        "OLD": f"s3://{bucket}/sdk",
        "NEW": f"s3://{bucket}/runs/llama",
        "STEP": "40",
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", snippet], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    commit = json.loads(client.get_object(Bucket=bucket, Key="runs/llama/checkpoint-40/.complete")["Body"].read())
    assert (commit["step"], commit["files"]) == (40, len(files))
    for name, content in files.items():
        assert client.get_object(Bucket=bucket, Key=f"runs/llama/checkpoint-40/{name}")["Body"].read() == content
    client.close()


def test_the_policy_allows_what_the_documents_say_and_nothing_else() -> None:
    policy = json.loads((ROOT / "deploy/s3/iam-policy.json").read_text())
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    [sentence] = re.findall(
        r"The credentials need, on the bucket and prefix,(.*?)\. ", (ROOT / "docs/deploy.md").read_text(), re.DOTALL
    )
    assert allowed == set(re.findall(r"s3:\w+", sentence))
    assert not any("*" in action for action in allowed)
    bucket, _, objects = policy["Statement"]
    assert bucket["Condition"]["StringLike"]["s3:prefix"] == objects["Resource"].partition(bucket["Resource"] + "/")[2]
