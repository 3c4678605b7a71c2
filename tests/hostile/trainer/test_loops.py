"""Attacks that are repeated in tight loops while the sidecar reads, sends and commits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.checks import check_log, most_memory_mib
from tests.hostile.trainer.attacks import (
    SECRET,
    exchange,
    growing_and_shrinking,
    outside_of,
    repeating,
    rewriting,
    state_of,
    stored_with,
    token_of,
)
from tests.marks import slow
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

ATTACK_S = 2.0
LONG_ATTACK_S = 12.0
FILE_BYTES = 4 << 20


def attacked(volume: Path, outside: Path) -> list[Callable[[], object]]:
    """Write checkpoints, some of them without a marker, and return the attacks on them."""
    attacks: list[Callable[[], object]] = []

    def checkpoint(step: int, *, finished: bool = True) -> Path:
        files = {"model": os.urandom(FILE_BYTES), "deep/model": os.urandom(FILE_BYTES), "z": b"z"}
        folder = write_checkpoint(volume, f"checkpoint-{step}", files, {})
        if not finished:
            (folder / ".complete").unlink()
        return folder

    for first, finished in ((100, True), (200, False)):
        for step, inside in enumerate(("model", "deep", "deep/model"), first):
            folder, link = checkpoint(step, finished=finished), volume / f"link-{step}"
            link.symlink_to(outside / inside)
            attacks.append(lambda one=folder / inside, other=link: exchange(one, other))
        folder, link = checkpoint(first + 10, finished=finished), volume / f"link-{first + 10}"
        link.symlink_to(outside)
        attacks.append(lambda one=folder, other=link: exchange(one, other))
        folder, token = checkpoint(first + 11, finished=finished), volume / f"token-{first}"
        os.link(volume / ".ckpt/token", token)
        attacks.append(lambda one=folder / "model", other=token: exchange(one, other))
        folder = checkpoint(first + 12, finished=finished)
        attacks.append(growing_and_shrinking(folder / "model", FILE_BYTES))
    marked = checkpoint(300)
    (volume / "marker").symlink_to(outside / ".complete")
    attacks.append(lambda: exchange(marked / ".complete", volume / "marker"))
    rewritten = checkpoint(301)
    attacks.append(rewriting(rewritten / ".complete", b"", b"{", b"{}", b'{"meta": {"a": 1}}', b"x" * 2_000_000))
    renamed = checkpoint(302)
    attacks.append(lambda: (renamed.rename(volume / "checkpoint-303"), (volume / "checkpoint-303").rename(renamed)))
    return attacks


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("attack_s", [ATTACK_S, *slow(LONG_ATTACK_S)])
def test_while_files_change_places_nothing_of_others_is_sent_and_other_checkpoints_are_committed(
    attack_s: float, place: Place, tmp_path: Path
) -> None:
    outside, store, volume = outside_of(tmp_path), tmp_path / "store", tmp_path / "volume"
    before = state_of(outside)
    with sidecar(volume, place.settings | {"CKPT_GRACE_SECONDS": "10"}) as running:
        running.ready()
        until(lambda: (volume / ".ckpt/token").exists())
        token = token_of(running)
        attacks = attacked(volume, outside)
        ends_s, step = time.monotonic() + attack_s, 0
        with repeating(*attacks):
            while time.monotonic() < ends_s or step < 3:
                step += 1
                write_checkpoint(volume, f"checkpoint-{1000 + step}", {"model": b"good %d" % step}, {})
                running.committed(f"checkpoint-{1000 + step}")
                assert stored_with(store, SECRET[:64]) == []
                assert stored_with(store, token) == []
        assert most_memory_mib(running) < 200
        assert running.terminate() in (0, 3)
    assert stored_with(store, SECRET[:64]) == stored_with(store, token) == []
    assert state_of(outside) == before
    check_log(running)
    check_commits(place, tmp_path)


def check_commits(place: Place, folder: Path) -> None:
    """Resume each committed step: none is torn between two versions of a file, and none holds what was not its own."""
    names = [path.parent.name for path in (folder / "store").glob("checkpoint-*/.complete")]
    assert len(names) >= 3
    with sidecar(folder / "new-volume", place.settings | {"CKPT_RESUME": "on-demand"}) as running:
        running.ready()
        for name in names:
            assert running.resume(name)["state"] == "ready", name
            for path, content in contents(running.volume / name).items():
                assert not content.startswith(SECRET[:64]), path
