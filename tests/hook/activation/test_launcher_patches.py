"""With each launcher, one SIGTERM to one process stops all ranks at one step with one finished checkpoint."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import Answers, Training, finished, marker, plain_environ, script, trainer_state, training, warm_ranks
from tests.hook.versions import TRAINER_5
from tests.ports import free_port
from tests.process.sidecar_process import until
from tests.processes import of_process, state_of
from trainer_hook.activation.run_command import INJECT

ROOT = Path(__file__).parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]


def ranks(launched: Training) -> dict[int, int]:
    """Return the pids of the ranks under a launcher."""
    found = {}
    for pid in launched.children():
        environ = of_process(pid, "environ").split(b"\0")
        found |= {int(entry[5:]): pid for entry in environ if entry.startswith(b"RANK=")}
    return found


def torchrun(**told: object) -> list[str]:
    return [*TORCHRUN, f"--master_port={free_port()}", *script(args={"max_steps": 30, "ddp_backend": "gloo"}, **told)[1:]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, int]:
    """Two ranks, one of which was sent SIGTERM. Its checkpoint is in ``store`` beside the volume."""
    path = tmp_path_factory.mktemp("ranks")
    with (
        pod(path / "volume", path / "store") as (sidecar, found),
        training(torchrun(sleep_s=0.1, rank_1_sleep_s=0.05), path / "volume", found | {"CKPT_SAVE_STEPS": "5"}) as running,
    ):
        running.at_step(7)
        until(lambda: len(ranks(running)) == 2)
        os.kill(ranks(running)[1], signal.SIGTERM)
        exit_code = running.wait()
        sidecar.committed(f"checkpoint-{running.steps()[-1]}")
        assert sidecar.terminate() == 0
    return running, exit_code


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_ranks_at_one_step(stopped: tuple[Training, int]) -> None:
    running, exit_code = stopped
    assert exit_code == 143, "not torchrun's own, which is 1"
    last, volume = running.steps()[-1], running.volume
    assert running.steps(rank=1)[-1] == last
    assert finished(volume) == [f"checkpoint-{step}" for step in range(5, last, 5)] + [f"checkpoint-{last}"]
    said = marker(volume, f"checkpoint-{last}")
    assert (said["world_size"], said["node"]) == (2, {"index": 0, "count": 1})
    assert said["reason"] == "jit" or last % 5 == 0, "or the ranks agreed in the periodic save"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {file["path"] for file in said["files"]}
    assert not list((volume / ".ckpt/ranks").glob("*.done"))
    assert trainer_state(volume)["state"] == "preempted"


@TRAINER_5
@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(stopped: tuple[Training, int], tmp_path: Path) -> None:
    (running, _), warm = stopped, warm_ranks()
    empty = tmp_path / "empty"
    with pod(empty, running.volume.parent / "store") as (_, found), training(torchrun(), empty, found | warm) as second:
        second.wait(timeout_s=150)  # not its exit code, for the same reason as below
        assert second.steps() == second.steps(rank=1) == list(range(running.steps()[-1] + 1, 31))
    with training(torchrun(), tmp_path / "alone", warm, hooked=False) as alone:
        alone.wait()  # its exit code is torch's own: gloo's threads may abort an interpreter on its way out
        assert alone.weights() == second.weights()


@pytest.mark.slow
def test_sigterm_to_torchrun_reaches_every_rank(volume: Path, answers: Answers) -> None:
    told = script(args={"max_steps": 200, "ddp_backend": "gloo"}, sleep_s=0.05)[1:]
    with training([*TORCHRUN, f"--master_port={free_port()}", *told], volume, answers.settings) as running:
        running.at_step(3, rank=1)
        assert running.terminate() == 143
        assert running.steps()[-1] == running.steps(rank=1)[-1]
        assert finished(volume) == [f"checkpoint-{running.steps()[-1]}"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["accelerate.commands.accelerate_cli", "launch"], ["accelerate.commands.launch"]])
def test_accelerate_launch_passes_the_signal_on_and_exits_as_its_trainer(
    command: list[str], volume: Path, answers: Answers
) -> None:
    launch = [sys.executable, "-m", *command, "--num_processes=1", "--cpu"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    with training([*launch, *script(args={"max_steps": 200}, sleep_s=0.05)[1:]], volume, answers.settings) as running:
        running.at_step(3)
        trainers = running.children()
        assert running.terminate() == 143, running.log()
        assert finished(volume) == [f"checkpoint-{running.steps()[-1]}"]
        assert not any(state_of(pid) for pid in trainers), "nobody is left behind"
        assert "Traceback" not in running.log()


@pytest.mark.slow
def test_where_the_shell_keeps_the_signal_to_itself_drain_ends_training(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    command = shlex.join(script(args={"max_steps": 200}, sleep_s=0.1)) + "; exit $?"
    with pod(volume, tmp_path / "store") as (sidecar, found), training(["sh", "-c", command], volume, found) as running:
        running.at_step(3)
        assert sidecar.command("drain").returncode == 0
        assert running.wait(timeout_s=30) == 143, running.log()
        assert marker(volume, f"checkpoint-{running.steps()[-1]}")["reason"] == "jit"
        sidecar.committed(f"checkpoint-{running.steps()[-1]}")


@pytest.mark.slow
@pytest.mark.parametrize(("state", "age_s", "expected"), [("preempted", 0, 143), ("preempted", 100, 1), ("running", 0, 1)])
def test_torchrun_ends_as_its_ranks_where_the_node_of_the_rendezvous_is_gone_before_them(
    state: str, age_s: int, expected: int, tmp_path: Path
) -> None:
    file, end = tmp_path / ".ckpt/trainer.json", tmp_path / "end.py"
    file.parent.mkdir()
    end.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        f"    open({str(file)!r}, 'w').write('{{\"state\": \"{state}\"}}')\n"
        f"    os.utime({str(file)!r}, times=(time.time() - {age_s},) * 2)\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "    time.sleep(60)\n"
        "time.sleep(3)\n"
        "sys.exit(143)\n"
    )
    at = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", at]
    command += ["--rdzv-conf=is_host={}", "--node-rank={}", str(end)]
    environ = {**os.environ, "CKPT_HOOK": "auto", "CKPT_DIR": str(tmp_path), "PYTHONPATH": f"{INJECT}:{ROOT}"}
    nodes = []
    for node in range(2):
        told = [part.format(int(node == 0) if "is_host" in part else node) for part in command]
        nodes.append(subprocess.Popen(told, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=100)[1] for node in nodes]
    assert nodes[0].returncode == 143, said[0]
    assert "RendezvousConnectionError" in said[1] or expected == 143
    assert nodes[1].returncode == expected, said[1]


@pytest.mark.slow
@pytest.mark.parametrize(("codes", "expected"), [((143, 143), 143), ((143, 7), 1), ((7, 7), 1)])
def test_torchrun_ends_as_its_ranks_only_where_all_that_failed_were_preempted(
    codes: tuple[int, int], expected: int, tmp_path: Path
) -> None:
    end, order = tmp_path / "end.py", tmp_path / "order"
    # torchrun ends the others of a rank that it sees to have failed: the second one is to fail by itself.
    first = f"import os, pathlib, time\nrank, order = int(os.environ['RANK']), pathlib.Path({str(order)!r})\n"
    waits = "while rank == 0 and not order.exists(): time.sleep(0.01)\ntime.sleep(0.3 * (rank == 0))\norder.touch()\n"
    end.write_text(f"{first}{waits}os._exit({codes}[rank])\n")
    command = [*TORCHRUN, f"--master_port={free_port()}", str(end)]
    environ = {**os.environ, "CKPT_HOOK": "auto", "PYTHONPATH": f"{INJECT}:{ROOT}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == expected, done.stderr


SIGNALLED_AT_THE_START = """
import os, signal, subprocess, time
from types import SimpleNamespace
from trainer_hook.activation.launcher_patches import patch_accelerate
execute = subprocess.Popen._execute_child
def execute_child(*arguments):
    execute(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)
subprocess.Popen._execute_child = execute_child
launch = SimpleNamespace(simple_launcher=lambda _: print(subprocess.Popen(["sleep", "20"]).wait()))
patch_accelerate(launch)
launch.simple_launcher(None)
"""


def test_a_signal_while_a_launcher_starts_its_trainer_is_passed_on_to_it() -> None:
    """The launcher ended alone, and left the trainer behind."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", SIGNALLED_AT_THE_START], env=environ, stdout=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, b"-15\n")
