"""On one GPU: a preempted run ends with the weights of an uninterrupted one, and saves during training hold the same bytes.

Two of the runs are made on the CPU with the slow tests, so that they work when a GPU is at hand.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import stall
from tests import servers
from tests.hook.story import Story, example, steps, told, torchrun, weights

pytestmark = pytest.mark.timeout(600)
SCRIPTS = Path(__file__).parent / "scripts"
DEVICES = [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("cpu", marks=pytest.mark.slow)]
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LAST = 48
LARGE = ("--width", "50000")
"""Files that are large enough to be worth a snapshot."""
SCRIPTED = {
    "transformers_trainer": (),
    "transformers_trainer, fp16": ("--precision", "fp16"),
    "transformers_trainer, bf16": ("--precision", "bf16"),
    "transformers_trainer, compiled": ("--compile",),
    "torch_loop": (),
    "torch_loop, half": ("--half",),
}
ON_CPU = [("transformers_trainer", True), ("torch_loop", False)]
"""The others differ only in what the device computes; ``fp16`` is refused there, and ``compiled`` needs a compiler."""
EXAMPLES = {
    "accelerate": lambda: example("train_accelerate.py", *LARGE),
    "lightning": lambda: example("train_lightning.py", *LARGE),
    "fsdp": lambda: torchrun("train_fsdp.py", processes=1),
}
"""On CPUs they are told with the hook's slow tests."""


@functools.cache
def _gpu() -> str:
    """Return the name of the GPU; empty: PyTorch finds none."""
    look = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if chosen == "cuda" and not _gpu():
        (pytest.fail if servers.is_required("CUDA") else pytest.skip)("PyTorch finds no GPU")
    return chosen


def _continues_bit_by_bit(command: Callable[[], list[str]], folder: Path, *, asynchronous: bool, last: int = LAST) -> Story:
    settings = DETERMINISTIC | {"CKPT_SAVE_STEPS": "8", "CKPT_ASYNC": str(int(asynchronous))}
    story = told(command, folder, until_step=20, settings=settings)
    assert story.exit_code == 143, story.first.log()
    stopped_at = steps(story.first)[-1]
    assert story.jit == f"checkpoint-{stopped_at}"
    assert steps(story.second) == list(range(stopped_at + 1, last + 1)), story.second.log()
    assert weights(story.second) == weights(story.alone)
    return story


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("name", SCRIPTED)
def test_a_preempted_run_ends_with_the_weights_of_an_uninterrupted_one(
    name: str, asynchronous: bool, device: str, tmp_path: Path
) -> None:
    if device == "cpu" and (name, asynchronous) not in ON_CPU:
        pytest.skip("needs a GPU")
    script = SCRIPTS / f"{name.split(',')[0]}.py"
    command = [sys.executable, str(script), "--device", device, *SCRIPTED[name], *(LARGE if asynchronous else ())]
    story = _continues_bit_by_bit(lambda: command, tmp_path, asynchronous=asynchronous)
    assert f"device {device}\n" in story.second.log()


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_with_the_weights_of_an_uninterrupted_run(name: str, device: str, tmp_path: Path) -> None:
    _continues_bit_by_bit(EXAMPLES[name], tmp_path, asynchronous=True, last=2 * LAST if name == "fsdp" else LAST)


def test_files_of_a_save_during_training_equal_those_of_a_blocking_one(device: str, tmp_path: Path) -> None:
    options = argparse.Namespace(saves=2, every=3, folder=tmp_path, is_cuda=device == "cuda")
    runs = [stall.run(mode, 0.1, options) for mode in (stall.BLOCKING, stall.OURS)]
    assert (runs[0].device == "cpu") == (not _gpu())
    assert stall.are_equal(runs)
