"""The state of a save request whose checkpoint does not stay."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.catalog.test_volume_trouble import new_life
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import ANSWER, AnswerFile, encode_answer


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_save_that_is_deleted_as_soon_as_it_is_durable_was_durable(tmp_path: Path, is_answered: bool) -> None:
    """Newer checkpoints were durable before it: its request had been "on its way to the store" for good."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="2")
        asked = services.save_requests.ask(stop=False)
        for step, reason in ((290, "manual"), (300, "periodic"), (310, "periodic")):
            write_checkpoint(tmp_path / "volume", f"checkpoint-{step}", {"m": b"x"}, {"reason": reason})
        if is_answered:  # otherwise by a hook without answers
            answer = AnswerFile(asked.id, "saved", "checkpoint-290")
            (services.volume / ANSWER).publish(encode_answer(answer))
        await services.scanner.scan()
        for step in (300, 310, 290):
            tracked = services.catalog.get(f"checkpoint-{step}")
            assert tracked
            services.catalog.durable(tracked, at_s=time.time())
        await services.volume_cleaner.clean_volume()
        await services.scanner.scan()
        assert services.catalog.get("checkpoint-290") is None
        services.save_requests.update()
        assert (asked.state, asked.checkpoint, asked.detail) == ("durable", "checkpoint-290", None)

    asyncio.run(scenario())


async def test_a_trainer_that_answers_and_ends_while_it_is_looked_at_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar without CPU time between its two looks said that the trainer had ended without an answer."""
    services = new_life(tmp_path / "volume")
    asked = services.save_requests.ask(stop=True)

    def ends_now() -> int:
        (services.volume / ANSWER).publish(encode_answer(AnswerFile(asked.id, "saved", "checkpoint-10")))
        return 0

    monkeypatch.setattr(services.volume, "held_leases", ends_now)
    services.save_requests.update()
    assert (asked.state, asked.checkpoint) == ("saved", "checkpoint-10")


async def test_a_step_that_is_saved_again_is_not_durable_by_its_earlier_version(tmp_path: Path) -> None:
    """The answer is there before the next scan; the request had the state of the version that was written over."""
    services = new_life(tmp_path / "volume")
    write_checkpoint(tmp_path / "volume", "checkpoint-10", {"m": b"x"}, {"reason": "periodic"})
    await services.scanner.scan()
    earlier = services.catalog.get("checkpoint-10")
    assert earlier is not None
    services.catalog.durable(earlier, at_s=time.time())
    asked = services.save_requests.ask(stop=False)
    write_checkpoint(tmp_path / "volume", "checkpoint-10", {"m": b"other"}, {"reason": "manual"})
    (services.volume / ANSWER).publish(encode_answer(AnswerFile(asked.id, "saved", "checkpoint-10")))
    services.save_requests.update()
    assert (asked.state, asked.detail) == ("saved", "it is on its way to the store")
    await services.scanner.scan()
    again = services.catalog.get("checkpoint-10")
    assert again is not None
    services.catalog.durable(again, at_s=time.time())
    assert asked.state == "durable"
