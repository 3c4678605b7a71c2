"""The pass after one that had ended, by a loader that saves its own position."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.stateful_dataloader")

from trainer_hook.loops import randomness  # noqa: E402
from trainer_hook.loops.loading import Pass  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def of_torchdata() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(range(12)), 4, shuffle=True)


def of_accelerate() -> Any:
    """It makes the iterator of its loader with the first batch, not before."""
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(
        torch.utils.data.DataLoader(list(range(12)), 4, shuffle=True)
    )


def batches(one: Pass) -> list[Any]:
    return [batch.tolist() for batch in one]


@pytest.mark.parametrize("make", [of_torchdata, of_accelerate])
def test_a_process_that_resumes_between_two_passes_has_the_batches_of_the_next(make: Any) -> None:
    torch.manual_seed(3)
    loader = make()
    ended = Pass(loader, all_gpus=False).begin()
    batches(ended)
    saved = ended.state()
    expected = batches(Pass(loader, all_gpus=False).begin())

    torch.manual_seed(3)
    loader = make()
    randomness.restore(saved["now"], all_gpus=False)
    assert batches(Pass(loader, all_gpus=False).begin_after(saved)) == expected


@pytest.mark.parametrize(("make", "is_said"), [(of_torchdata, False), (of_accelerate, True)])
def test_a_resume_in_a_pass_of_accelerates_is_said_not_to_be_exact(
    make: Any, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Pass(make(), all_gpus=False).begin()
    next(one)
    Pass(make(), all_gpus=False).resume(one.state(), 1)
    assert ("not bit-identical: accelerate draws" in capsys.readouterr().err) is is_said
