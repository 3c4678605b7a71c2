"""The pass after one that had ended, by a loader that saves its own position."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lazy import LazyModule

torch, torchdata = LazyModule("torch"), LazyModule("torchdata")
loading, randomness = LazyModule("trainer_hook.loops.loading"), LazyModule("trainer_hook.loops.randomness")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(autouse=True)
def _needs_torchdata() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")


def of_torchdata() -> Any:
    return torchdata.stateful_dataloader.StatefulDataLoader(list(range(12)), 4, shuffle=True)


def of_accelerate() -> Any:
    """It makes the iterator of its loader with the first batch, not before."""
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(
        torch.utils.data.DataLoader(list(range(12)), 4, shuffle=True)
    )


def batches(one: Any) -> list[Any]:
    return [batch.tolist() for batch in one]


@pytest.mark.parametrize("make", [of_torchdata, of_accelerate])
def test_a_process_that_resumes_between_two_passes_has_the_batches_of_the_next(make: Any) -> None:
    torch.manual_seed(3)
    loader = make()
    ended = loading.Pass(loader, all_gpus=False).begin()
    batches(ended)
    saved = ended.state()
    expected = batches(loading.Pass(loader, all_gpus=False).begin())

    torch.manual_seed(3)
    loader = make()
    randomness.restore(saved["now"], all_gpus=False)
    assert batches(loading.Pass(loader, all_gpus=False).begin_after(saved)) == expected


@pytest.mark.parametrize(("make", "is_said"), [(of_torchdata, False), (of_accelerate, True)])
def test_a_resume_in_a_pass_of_accelerates_is_said_not_to_be_exact(
    make: Any, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    one = loading.Pass(make(), all_gpus=False).begin()
    next(one)
    loading.Pass(make(), all_gpus=False).resume(one.state(), 1)
    assert ("not bit-identical: accelerate draws" in capsys.readouterr().err) is is_said
