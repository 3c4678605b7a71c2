"""One example, told twice: through two pods with an empty volume between them, and in one go without a volume."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.hook.conftest import pod
from tests.hook.job import ROOT, Training, finished, training
from tests.ports import free_port

LONG_S = 150.0
"""Libraries and launchers start several processes that import for seconds, on a machine that may be busy."""
SLOWLY = ["--step-seconds", "0.1"]


@dataclass
class Story:
    """What was seen."""

    first: Training
    second: Training
    alone: Training
    exit_code: int
    store: Path

    @property
    def jit(self) -> str:
        """Name of the checkpoint that was saved just in time."""
        return finished(self.first.volume)[-1]


def example(name: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / name), *options]


def torchrun(name: str, *options: str, processes: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1"]
    return [*launcher, f"--master_port={free_port()}", str(ROOT / "examples" / name), *options]


def deepspeed(name: str, *options: str) -> list[str]:
    launcher = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()", "--num_accelerators=2"]
    return [*launcher, f"--master_port={free_port()}", str(ROOT / "examples" / name), *options]


def told(command: Callable[[], list[str]], path: Path, *, until_step: int, settings: dict[str, str]) -> Story:
    """Run it until a step, send SIGTERM, lose the volume, run it to its end; then once more without a volume."""
    store, slowly, without = path / "store", [*command(), *SLOWLY], settings | {"CKPT_DIR": ""}
    with training(command(), path / "alone", without, hooked=False) as alone:  # beside the first, which mostly sleeps
        with pod(path / "first", store) as (sidecar, found), training(slowly, path / "first", found | settings) as first:
            first.said(f"step {until_step} ", timeout_s=LONG_S)
            exit_code = first.terminate()
            assert finished(path / "first"), first.log()
            sidecar.committed(finished(path / "first")[-1])
            assert sidecar.terminate() == 0
        alone.wait(timeout_s=LONG_S)
    with pod(path / "second", store) as (_, found), training(command(), path / "second", found | settings) as second:
        second.wait(timeout_s=LONG_S)
    return Story(first, second, alone, exit_code, store)


def weights(run: Training) -> str:
    found = re.findall(r"^weights sha256 (\w+)$", run.log(), re.MULTILINE)
    assert found, run.log()
    return found[-1]


def steps(run: Training) -> list[int]:
    """Return the steps that were trained, as the example tells them."""
    return [int(step) for step in re.findall(r"^step (\d+) ", run.log(), re.MULTILINE)]
