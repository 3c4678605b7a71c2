"""A resumed loop says that it is not exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.lazy import LazyModule
from trainer_hook.process.rank_consensus import World

torch, data, loading, loops = map(
    LazyModule, ("torch", "torch.utils.data", "trainer_hook.loops.loading", "trainer_hook.loops.loop")
)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield torch.nn.Linear(2, 2)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("size", "wrapped", "is_said"),
    [
        (3, {}, True),
        (3, {"static_graph": True}, True),
        (3, {"find_unused_parameters": True}, False),
        (3, None, False),
        (2, {}, False),
    ],
)
def test_more_than_two_ranks_sum_their_first_gradients_in_another_order(
    size: int,
    wrapped: dict[str, Any] | None,
    is_said: bool,
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))
    saved = loops.Loop({"model": model if wrapped is None else torch.nn.parallel.DistributedDataParallel(model, **wrapped)})
    saved._world = World(0, size, ranks=tuple(range(size)))
    saved.global_step, folder = 1, tmp_path / "checkpoint-1"
    saved._write_all(folder)
    saved._resume(SimpleNamespace(resume=lambda: SimpleNamespace(path=folder, name="checkpoint-1")))
    assert ("not bit-identical" in capsys.readouterr().err) == is_said


def stream_of_epochs() -> Any:
    class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(10 * self.epoch, 10 * self.epoch + 3))

    return Stream()


@pytest.mark.parametrize(("epoch", "workers", "is_said"), [(1, 1, True), (0, 1, False), (1, 0, False)])
def test_persistent_workers_do_not_learn_of_the_epoch_of_a_stream(
    epoch: int, workers: int, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))
    stream = stream_of_epochs()
    loader = data.DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    loop = loops.Loop({}, None)
    loop._call, loop._world, loop.epoch, loop.batch = cast("Any", object()), World(), epoch, 1
    loop._resumed = {name: loop_state(loader) for name in ("start", "first", "last", "now")} | {"loader": None}
    stream.set_epoch(epoch)
    assert next(loop._begin_pass(loader)) == 10 * epoch + 1
    assert ("not bit-identical: from the second pass on" in capsys.readouterr().err) == is_said
    stream.set_epoch(5)
    assert (next(iter(loader)) == 50) == (workers == 0), "workers that persist keep the epoch of their first pass"


def loop_state(loader: Any) -> dict[str, Any]:
    state: dict[str, Any] = loading.Pass(loader, all_gpus=True)._read()
    return state
