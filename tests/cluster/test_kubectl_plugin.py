"""``kubectl ckpt`` on injected jobs: kubectl finds the plugin on PATH, and needs nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.cluster.kubectl import Namespace, Object, kubectl, until
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story, assert_no_step_was_lost, steps
from tests.cluster.torch_runs import rank_zero, torchrun
from tests.cluster.workloads import Workloads

STEPS = 400
SAVE_EVERY = 20
"""A script that saves by itself answers a request with its next save."""


class Plugin:
    """``kubectl ckpt`` in one namespace. The program is that of this interpreter, under the name that kubectl looks for."""

    def __init__(self, folder: Path, namespace: Namespace, **environ: str) -> None:
        program = folder / "kubectl-ckpt"
        program.write_text(
            f"#!/bin/sh\nexec {sys.executable} -c 'from sidecar.kubectl.main import main; exit(main())' \"$@\"\n"
        )
        program.chmod(0o755)
        root = str(Path(__file__).parents[2])
        self._environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": root} | environ
        self._namespace = namespace

    def run(self, *arguments: str, code: int = 0, stream: str = "", timeout_s: float = 150) -> str:
        """Return what it printed: of a failed command on standard error, unless ``stream`` says otherwise."""
        done = self.attempt(*arguments, timeout_s=timeout_s)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}\n{self._namespace.watch.report()}"
        return done.stdout if not code or stream == "stdout" else done.stderr

    def attempt(self, *arguments: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "ckpt", *arguments, "-n", self._namespace.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=self._environ)

    def json(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(*arguments, "--json"))
        return found


@pytest.fixture
def plugin(tmp_path: Path, namespace: Namespace) -> Plugin:
    return Plugin(tmp_path, namespace)


def slow_job(workloads: Workloads) -> Object:
    return workloads.job(workloads.file_pod(STEPS=STEPS, SAVE_EVERY=SAVE_EVERY, SECRET_TOKEN="zQ7xV9kJ2wY4"))


def test_a_job_is_shown_saved_and_paused_and_goes_on_without_a_lost_step(
    story: Story, workloads: Workloads, plugin: Plugin
) -> None:
    story.start(slow_job(workloads))
    story.at_step(5)
    saved = plugin.json("save", "job/run")
    assert saved["state"] == "durable"
    step = int(saved["checkpoint"].removeprefix("checkpoint-"))
    assert step in story.committed()

    found = plugin.json("status", "run")
    assert (found["kind"], found["pods_answering"], found["pods_wanted"]) == ("Job", 1, 1)
    assert found["durable_step"] >= step
    assert found["level"] in ("safe", "unknown")
    shown = plugin.run("status", "run")
    assert "durable    step " in shown
    assert "1 of 1 sidecars answer" in shown

    paused = plugin.json("pause", "run")
    assert (paused["suspended"], paused["pods_left"], paused["workload"]) == (True, [], "Job run")
    assert story.namespace.get("job", "run")["spec"]["suspend"] is True
    assert "The job is suspended" in plugin.run("status", "run", "--json", code=6, stream="stdout")
    assert "is suspended already" in plugin.run("pause", "run", code=7)
    before = story.lives()[0]
    story.durable(steps(before)[-1])

    subprocess.run(paused["continue_with"], shell=True, check=True, capture_output=True)
    story.at_step(steps(before)[-1] + 1, life=1)
    assert_no_step_was_lost(before, story.lives()[1])
    story.namespace.kubectl("delete", "job", "run", "--wait=false")


@pytest.mark.usefixtures("jobsets", "torch")
@pytest.mark.timeout(900)
def test_both_nodes_of_a_jobset_save_one_step_and_pausing_its_job_suspends_the_jobset(
    story: Story, workloads: Workloads, plugin: Plugin
) -> None:
    story.kind = "jobset"
    command = torchrun("run-node-0-0.run", "--epochs=40", "--step-seconds=0.2")
    story.start(workloads.jobset(workloads.pod(command, torch=True)))
    rank_zero(story, 0, 5)
    saved = plugin.json("save", "run", "--timeout", "2m")
    assert saved["state"] == "durable", saved
    step = int(saved["checkpoint"].removeprefix("checkpoint-"))
    assert step in story.committed()
    found = plugin.json("status", "jobset/run")
    assert (found["kind"], found["pods_answering"], found["pods_wanted"]) == ("JobSet", 2, 2)
    assert [pod["node_index"] for pod in found["pods"]] == [0, 1]
    assert found["durable_step"] >= step
    assert found["trained_step"] >= step

    paused = plugin.json("pause", "job/run-node-0")
    assert (paused["suspended"], paused["workload"]) == (True, "JobSet run")
    assert story.namespace.get("jobset", "run")["spec"]["suspend"] is True
    until(lambda: not story.namespace.living(), what=story.namespace.watch.report)
    last = steps(next(life for life in story.lives() if steps(life)))[-1]
    assert story.committed()[-1] == last, "the pods have saved once more as they ended"


def test_a_bundle_says_what_happened_and_has_no_secret(
    story: Story, workloads: Workloads, plugin: Plugin, settings: ClusterSettings, tmp_path: Path
) -> None:
    story.start(slow_job(workloads))
    story.at_step(5)
    plugin.run("save", "run")
    path = tmp_path / "bundle.tar.gz"
    plugin.run("bundle", "run", "-o", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        files = {
            member.name.removeprefix("job-run/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    [pod] = [pod["metadata"]["name"] for pod in story.namespace.living()]
    assert {"about.json", "events.txt", "missing.txt", "status.json", "workload.json"} <= set(files)
    assert {f"pods/{pod}/{name}" for name in ("pod.json", "status.json", "ls.json", "logs/checkpoint-sidecar.log")} <= set(
        files
    )
    assert not any("trainer.log" in name for name in files)
    for name in files:
        assert not name.endswith(".json") or json.loads(files[name]), name
    assert json.loads(files["status.json"])["durable_step"] in story.committed()
    assert "checkpoint_committed" in files[f"pods/{pod}/logs/checkpoint-sidecar.log"]
    assert "SuccessfulCreate" in files["events.txt"]
    assert f"s3://{settings.bucket}/" in files["workload.json"], "settings stay"
    everything = "\n".join(files.values())
    assert "zQ7xV9kJ2wY4" not in everything
    assert not settings.secret_key or settings.secret_key not in everything
    assert set(files["missing.txt"].splitlines()[0].split(":")[:1]) <= {f"pods/{pod}/exit-report.json"}
    story.namespace.kubectl("delete", "job", "run", "--wait=false")


def test_what_is_not_there_is_named_with_the_next_step(story: Story, workloads: Workloads, plugin: Plugin) -> None:
    assert "no job called 'run'" in plugin.run("status", "run", code=5)
    assert "'cronjob' is not one of" in plugin.run("save", "cronjob/run", code=2)
    plain = workloads.job(workloads.pod(["python3", "-c", "import time; time.sleep(600)"], container="plain"), name="plain")
    story.namespace.apply(plain)
    until(lambda: story.namespace.living(), what="the plain pod")
    assert "'checkpoint-sidecar inject'" in plugin.run("status", "plain", code=5)
    assert "no pod of Job plain has a sidecar" in plugin.run("pause", "plain", code=5)
    assert story.namespace.get("job", "plain")["spec"].get("suspend") is not True
    story.namespace.kubectl("delete", "job", "plain", "--wait=false")


ROLE = Path(__file__).parents[2] / "deploy/kubernetes/kubectl-ckpt-role.yaml"


def as_person(folder: Path, namespace: Namespace, role: Object) -> Path:
    """Return a kubeconfig of somebody who has this role in the namespace and no other right."""
    subject = {"kind": "ServiceAccount", "name": "jane", "namespace": namespace.name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    namespace.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "jane"}},
        role,
        {"apiVersion": role["apiVersion"], "kind": "RoleBinding", "metadata": {"name": "jane"}}
        | {"roleRef": reference, "subjects": [subject]},
    )
    token = namespace.kubectl("create", "token", "jane").strip()
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    path = folder / "jane.json"
    path.write_text(json.dumps(config))
    return path


def test_the_documented_role_is_enough_and_without_exec_it_says_what_is_missing(
    story: Story, workloads: Workloads, tmp_path: Path
) -> None:
    role: Object = YAML(typ="safe").load(ROLE.read_text())
    person = Plugin(tmp_path, story.namespace, KUBECONFIG=str(as_person(tmp_path, story.namespace, role)))
    story.start(slow_job(workloads))
    story.at_step(5)
    assert person.json("status", "run")["pods_answering"] == 1
    path = tmp_path / "bundle.tar.gz"
    person.run("bundle", "job/run", "-o", str(path))
    with tarfile.open(path) as archive:
        assert "job-run/events.txt" in archive.getnames()
    without = role | {"rules": [rule for rule in role["rules"] if "pods/exec" not in rule["resources"]]}
    story.namespace.apply(without)
    refused = until(lambda: _refused(person), what="the right is gone")
    assert "pods/exec" in refused
    assert "ask for a role with this right" in refused
    story.namespace.apply(role)
    paused = until(lambda: _paused(person), what="the right is there again", timeout_s=60)
    assert paused["suspended"] is True


def _refused(person: Plugin) -> str:
    done = person.attempt("status", "run")
    return done.stderr if done.returncode == 2 else ""


def _paused(person: Plugin) -> dict[str, Any]:
    done = person.attempt("pause", "run", "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {}
