"""An asynchronous save writes the bytes of a blocking save at one step, or nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lazy import LazyModule
from tests.mounts import small_volume
from tests.process.sidecar_process import until
from tests.processes import state_of
from trainer_hook.asynchronous import background, deferring, host_memory, snapshot
from trainer_hook.asynchronous.background import Background
from trainer_hook.asynchronous.host_memory import Limit, memory_shortage
from trainer_hook.asynchronous.writer_process import WRITER_BYTES, NotWritten, WriterDied

if TYPE_CHECKING:
    import safetensors.torch
    import torch

    from trainer_hook.loops import state_files
else:
    torch, safetensors, state_files = map(LazyModule, ("torch", "safetensors", "trainer_hook.loops.state_files"))

BIG = deferring.SMALL_BYTES
PLENTY = Limit(1 << 50, "of the machine")


@pytest.fixture(scope="module")
def shared() -> Iterator[Background]:
    """One that many tests use, because its process takes seconds to start."""
    one = Background()
    yield one
    one.close()


@pytest.fixture
def fresh(shared: Background) -> Background:
    """The same, without what failed before."""
    shared._failures, shared._torn = 0, False
    return shared


@pytest.fixture
def own() -> Iterator[Background]:
    """One without a process, at first."""
    one = Background()
    yield one
    one.close()


def write_beside(beside: Background, folder: Path, save: Callable[[], None], optimizer: Any = None) -> Exception | None:
    """Save into a folder and wait. Returns what went wrong."""
    folder.mkdir(exist_ok=True)
    captured = beside.capture(folder, save, optimizer=optimizer)
    assert captured is not None
    assert captured.files, "nothing was deferred"
    outcome: list[Exception | None] = []
    beside.start(captured, folder, outcome.append)
    assert beside.wait(90)
    return outcome[0]


def state(width: int = 512) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of some MB and an optimizer that has made a step."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, model[0].in_features)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_all(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(model.state_dict(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))  # noqa: PTH118 - as the Trainer does


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = getattr(torch, draw(st.sampled_from(DTYPES))), draw(SHAPES)
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    return made.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else made


NESTS = st.recursive(
    tensors() | st.integers() | st.text(max_size=5) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nest=NESTS, view=st.integers(0, 7))
def test_any_object_gives_the_bytes_that_torch_save_gives(shared: Background, tmp_path: Path, nest: Any, view: int) -> None:
    large = torch.arange(BIG // 4, dtype=torch.float32)
    told = {"nest": nest, "again": nest, "views": [large[view:], large.view(-1, 2)[view]]}
    assert write_beside(shared, tmp_path / "beside", lambda: torch.save(told, tmp_path / "beside/optimizer.pt")) is None
    (tmp_path / "blocking").mkdir(exist_ok=True)
    torch.save(told, tmp_path / "blocking/optimizer.pt")
    assert content(tmp_path / "beside") == content(tmp_path / "blocking")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(more=st.dictionaries(st.text(min_size=1, max_size=3), tensors().map(lambda tensor: tensor.contiguous()), max_size=4))
def test_any_tensors_give_the_bytes_that_safetensors_gives(shared: Background, tmp_path: Path, more: Any) -> None:
    told = {"weight": torch.randn(BIG // 4 + 1)} | more
    beside, blocking = tmp_path / "beside", tmp_path / "blocking"
    assert write_beside(shared, beside, lambda: safetensors.torch.save_file(told, beside / "m.safetensors", {"a": "b"})) is None
    blocking.mkdir(exist_ok=True)
    safetensors.torch.save_file(told, blocking / "m.safetensors", {"a": "b"})
    assert content(beside) == content(blocking)


def test_objects_of_a_loop_give_the_files_of_a_blocking_save(shared: Background, tmp_path: Path) -> None:
    model, optimizer = state()

    def save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        state_files.write(state_files.collect({"model": model, "optimizer": optimizer}), folder, rank=0, group=None)

    save(tmp_path / "blocking")
    captured = shared.capture(tmp_path / "beside", lambda: save(tmp_path / "beside"))
    assert captured is not None
    step(model, optimizer)  # as the next step of the loop does, before anything is written
    outcome: list[Exception | None] = []
    shared.start(captured, tmp_path / "beside", outcome.append)
    assert shared.wait(90)
    assert outcome == [None]
    assert content(tmp_path / "beside") == content(tmp_path / "blocking")
    assert set(content(tmp_path / "beside")) == {"model.safetensors", "optimizer.pt"}


def test_tied_tensors_are_refused_as_safetensors_refuses_them(shared: Background, tmp_path: Path) -> None:
    weight = torch.randn(BIG)
    error = write_beside(
        shared, tmp_path / "x", lambda: safetensors.torch.save_file({"a": weight, "b": weight}, tmp_path / "x/m.safetensors")
    )
    assert "share memory" in str(error)


def test_small_files_and_files_elsewhere_are_written_at_once(shared: Background, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()

    def save() -> None:
        torch.save(torch.zeros(5), tmp_path / "inside/small.pt")
        torch.save(torch.zeros(BIG), tmp_path / "elsewhere.pt")
        with (tmp_path / "inside/file.pt").open("wb") as file:
            torch.save(torch.zeros(BIG), file)

    captured = shared.capture(tmp_path / "inside", save)
    assert captured is not None
    assert captured.files == []
    assert torch.load(tmp_path / "elsewhere.pt", weights_only=True).equal(torch.zeros(BIG))
    assert torch.load(tmp_path / "inside/file.pt", weights_only=True).equal(torch.zeros(BIG))
    assert torch.save.__module__ == "torch.serialization"


def slowly(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make each piece of a copy take a while. Returns when each was copied."""
    copied: list[float] = []
    memcpy = snapshot._memcpy()

    def late(*piece: int) -> None:
        time.sleep(0.02)
        memcpy(*piece)
        copied.append(time.monotonic())

    monkeypatch.setattr(snapshot, "_memcpy", lambda: late)
    return copied


def test_the_optimizer_waits_for_the_copy_and_nothing_else_does(
    shared: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = state()
    save_all(model, optimizer, tmp_path / "blocking")
    copied = slowly(monkeypatch)
    captured = shared.capture(tmp_path / "beside", lambda: save_all(model, optimizer, tmp_path / "beside"), optimizer=optimizer)
    assert captured is not None
    returned_s, outcome = time.monotonic(), []
    shared.start(captured, tmp_path / "beside", outcome.append)
    model(torch.randn(4, 512)).square().sum().backward()  # changes the running means of the model
    optimizer.step()
    stepped_s = time.monotonic()
    assert shared.wait(90)
    assert outcome == [None]
    assert returned_s < copied[0]
    assert max(copied) < stepped_s
    assert content(tmp_path / "beside") == content(tmp_path / "blocking")
    step(model, optimizer)
    assert len(copied) == len(set(copied)), "the next step has nothing to wait for"


def test_a_change_that_is_not_the_optimizers_makes_the_save_fail_and_the_next_ones_copy_at_once(
    fresh: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = state()
    slowly(monkeypatch)

    def save() -> None:
        save_all(model, optimizer, tmp_path / "beside")

    captured = fresh.capture(tmp_path / "beside", save, optimizer=optimizer)
    assert captured is not None
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)
    outcome: list[Exception | None] = []
    fresh.start(captured, tmp_path / "beside", outcome.append)
    assert fresh.wait(90)
    assert isinstance(outcome[0], snapshot.TornSnapshot)
    save_all(model, optimizer, tmp_path / "blocking")
    captured = fresh.capture(tmp_path / "beside", save, optimizer=optimizer)
    assert captured is not None
    with torch.no_grad():
        model[0].weight.zero_()
    fresh.start(captured, tmp_path / "beside", outcome.append)
    assert fresh.wait(90)
    assert outcome[1] is None
    assert content(tmp_path / "beside") == content(tmp_path / "blocking")


def test_an_interrupt_while_the_optimizer_waits_hangs_nothing(
    fresh: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = state()
    save_all(model, optimizer, tmp_path / "blocking")
    memcpy = snapshot._memcpy()

    def interrupted(*piece: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.02)
        memcpy(*piece)

    monkeypatch.setattr(snapshot, "_memcpy", lambda: interrupted)
    captured = fresh.capture(tmp_path / "x", lambda: save_all(model, optimizer, tmp_path / "x"), optimizer=optimizer)
    assert captured is not None
    outcome: list[Exception | None] = []
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    fresh.start(captured, tmp_path / "x", outcome.append)
    assert fresh.wait(90)
    assert outcome == [None]
    assert content(tmp_path / "x") == content(tmp_path / "blocking")


def test_an_optimizer_that_may_step_elsewhere_is_not_relied_upon() -> None:
    class InBackward(torch.optim.SGD):
        """Steps in hooks of the backward pass, as some do that save memory."""

    parameter = torch.nn.Parameter(torch.zeros(1))
    own = torch.optim.AdamW([parameter])
    assert snapshot.steps_alone(own)
    assert snapshot.steps_alone(type("Wrapped", (), {"__module__": "accelerate.optimizer", "optimizer": own})())
    assert not snapshot.steps_alone(InBackward([parameter]))
    assert not snapshot.steps_alone(SimpleNamespace(optimizer=own)), "a wrapper may do something before"


def test_a_killed_process_is_one_failed_save_and_the_next_has_a_new_one(
    own: Background, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = state()
    for number in range(background.MAX_CONSECUTIVE_FAILURES):
        folder = tmp_path / str(number)
        captured = own.capture(folder, lambda folder=folder: save_all(model, optimizer, folder))
        assert captured is not None
        pid = own.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        outcome: list[Exception | None] = []
        own.start(captured, folder, outcome.append)
        assert own.busy
        assert not own.wait(0.05)
        os.kill(pid, signal.SIGKILL)
        assert own.wait(90)
        assert isinstance(outcome[0], WriterDied)
    captured = own.capture(tmp_path / "last", lambda: save_all(model, optimizer, tmp_path / "last"))
    assert captured is None, "then saves block"
    assert set(content(tmp_path / "last")) == {"model.safetensors", "optimizer.pt"}
    assert capfd.readouterr().err.count("from now on saves block") == 1


def test_what_cannot_be_written_is_told_and_does_not_end_saving(fresh: Background, tmp_path: Path) -> None:
    model, optimizer = state()

    def save() -> None:
        save_all(model, optimizer, tmp_path / "x")

    assert write_beside(fresh, tmp_path / "x", save) is None
    assert fresh.pid is not None
    resource.prlimit(fresh.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    assert isinstance(write_beside(fresh, tmp_path / "x", save), NotWritten)
    resource.prlimit(fresh.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert write_beside(fresh, tmp_path / "x", save) is None
    save_all(model, optimizer, tmp_path / "blocking")
    assert content(tmp_path / "x") == content(tmp_path / "blocking")


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_full_volume_is_no_reason_to_block(fresh: Background, tmp_path: Path, name: str) -> None:
    model, optimizer = state()
    with small_volume(tmp_path, "3m"):
        save_all(model, optimizer, tmp_path.parent / "blocking")
        if name == "model.safetensors":  # 1 MiB, optimizer.pt has 2
            (tmp_path / "others").write_bytes(b"x" * (5 << 19))
        for _ in range(background.MAX_CONSECUTIVE_FAILURES + 1):
            error = write_beside(fresh, tmp_path / "x", lambda: save_all(model, optimizer, tmp_path / "x"))
            assert "the volume is full" in str(error) or "No space left on device" in str(error), error
        pid = fresh.pid
        subprocess.run(["mount", "-o", "remount,size=9M", str(tmp_path)], check=True)
        assert write_beside(fresh, tmp_path / "x", lambda: save_all(model, optimizer, tmp_path / "x")) is None
        assert content(tmp_path / "x") == content(tmp_path.parent / "blocking")
        assert fresh.pid == pid


def test_without_memory_for_a_snapshot_the_save_blocks_and_says_why_once(
    own: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = state()
    save_all(model, optimizer, tmp_path / "blocking")
    monkeypatch.setattr(host_memory, "available", lambda: Limit(WRITER_BYTES, "of the container"))
    for _ in range(2):
        assert own.capture(tmp_path / "x", lambda: save_all(model, optimizer, tmp_path / "x")) is None
        assert content(tmp_path / "x") == content(tmp_path / "blocking")
    assert own.pid is None
    said = capfd.readouterr().err
    assert said.count("this save blocks training") == 1
    assert "memory of the container" in said


@given(size=st.integers(0, 1 << 40), held=st.integers(0, 1 << 40), free=st.integers(-(1 << 30), 1 << 41))
def test_a_snapshot_fits_when_what_is_new_of_it_fits(size: int, held: int, free: int) -> None:
    said = memory_shortage(size, held_bytes=held, limit=Limit(free, "of the machine"))
    new = max(0, size - held) + (0 if held else WRITER_BYTES)
    assert (said is None) == (size <= held or new <= free)


def test_the_process_dies_with_the_trainer_and_outlives_signals_to_its_group(tmp_path: Path) -> None:
    program = (
        "import sys, time, torch; from pathlib import Path; from trainer_hook.asynchronous.background import Background\n"
        "one, folder = Background(), Path(sys.argv[1]); one.prepare(1 << 20)\n"
        "captured = one.capture(folder, lambda: torch.save(torch.zeros(1 << 20), folder / 'x.pt'))\n"
        "print(one.pid, flush=True); one.start(captured, folder, print); one.wait()\n"
        "print('written', flush=True); time.sleep(60)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        assert [trainer.stdout.readline(), trainer.stdout.readline()] == ["None\n", "written\n"]
    finally:
        trainer.kill()
        trainer.communicate()
    until(lambda: state_of(pid) is None)
