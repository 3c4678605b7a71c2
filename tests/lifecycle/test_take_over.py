"""Which pod takes a prefix over, and what it waits for, on a real folder and a simulated clock."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable

import pytest

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import (
    ENDING_SILENCE_S,
    START_TOLERANCE_S,
    Claim,
)
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, CHECK_S, SILENCE_S
from sidecar.errors import ConfigurationError, Fenced
from sidecar.lifecycle.holder_watch import UPLOAD_S
from sidecar.lifecycle.run_document import claim, read
from sidecar.store.file.store import FileStore
from sidecar.transfer.executor import StoreExecutor
from tests.lifecycle.pods import Pod


async def test_a_pod_that_is_ending_is_waited_for_until_it_says_that_it_has_ended(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.take_over.settle()
    earlier.deadline.in_s = 50.0
    await earlier.renewal.renew(1)
    waited_for = []

    async def beat_and_end() -> None:
        waited_for.append(later.watch.waits_for)
        if later.now_s < 3 * SILENCE_S:
            await earlier.renewal.renew(2)
        else:
            await earlier.lease.require_not_fenced()
            await earlier.renewal.release()

    later.on_sleep = beat_and_end
    await later.watch.wait_for_ending()
    assert 3 * SILENCE_S <= later.now_s <= 3 * SILENCE_S + 2
    assert "earlier" in waited_for[0]
    assert later.watch.waits_for is None


async def test_a_pod_that_died_while_it_was_ending_is_waited_for_until_it_is_silent(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.deadline.in_s = 500.0
    await earlier.take_over.settle()
    await later.watch.wait_for_ending()
    assert ENDING_SILENCE_S <= later.now_s <= ENDING_SILENCE_S + 2


async def test_a_pod_that_is_ending_itself_leaves_the_earlier_one_half_of_its_time(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.deadline.in_s, later.deadline.in_s = 500.0, 40.0
    await earlier.take_over.settle()
    later.on_sleep = functools.partial(earlier.renewal.renew, 2)
    await later.watch.wait_for_ending()
    assert later.now_s == 20
    await earlier.lease.require_not_fenced()


async def test_of_many_that_take_over_at_once_one_holds_the_prefix_in_the_end(
    store: FileStore, executor: StoreExecutor
) -> None:
    pods = [Pod(store, executor, f"pod-{number}") for number in range(8)]
    await asyncio.gather(*(pod.take_over.settle() for pod in pods), return_exceptions=True)
    held = await asyncio.gather(*(pod.lease.require_not_fenced() for pod in pods), return_exceptions=True)
    assert sum(each is None for each in held if not isinstance(each, Fenced)) == 1


async def test_a_pod_that_was_cut_off_before_its_first_claim_does_not_fence_its_replacement(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.started_s = 2 * START_TOLERANCE_S
    await later.take_over.settle()
    with pytest.raises(Fenced, match=r"a later pod of this job \(later\)"):
        await earlier.take_over.settle()
    await later.lease.require_not_fenced()
    again = Pod(store, executor, "earlier")  # its sidecar starts again, and the pod is as old as before
    again.started_s = 3 * START_TOLERANCE_S
    with pytest.raises(Fenced):
        await again.take_over.settle()
    assert read(store).holder == "later"
    assert [stored.key for stored in store.list(keys.CLAIMS)] == [Claim(1, later.lease.holder.id).key]


async def test_a_claim_that_is_written_again_late_keeps_its_time_and_age(store: FileStore, executor: StoreExecutor) -> None:
    """Its pod seemed to have started later than it had, and its replacement took itself for the earlier pod."""
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()
    [before] = store.list(keys.CLAIMS)
    pod.now_s = 60.0
    assert pod.lease.claim
    pod.lease.documents.put_claim(pod.lease.claim, pod.lease.holder, pod)
    [after] = store.list(keys.CLAIMS)
    claimed = pod.lease.documents.claimed(pod.lease.claim)
    assert (after.modified, claimed and claimed.age_s) == (before.modified, 0.0)


async def test_a_pod_that_goes_does_not_fence_one_that_started_at_about_the_same_time(
    store: FileStore, executor: StoreExecutor
) -> None:
    """It fenced its replacement, whose trainer was told to stop, and ended a second later itself."""
    going, staying = Pod(store, executor, "going"), Pod(store, executor, "staying")
    going.started_s = START_TOLERANCE_S / 2
    await staying.take_over.settle()
    going.deadline.in_s = 20.0
    going.on_sleep = functools.partial(staying.renewal.renew, int(ASK_POLL_S))
    with pytest.raises(Fenced, match="staying"):
        await going.take_over.settle()
    assert going.now_s == 1
    await staying.lease.require_not_fenced()


@pytest.mark.parametrize("left_s", [20.0, SILENCE_S + UPLOAD_S, SILENCE_S + UPLOAD_S - 1])
async def test_a_pod_that_goes_takes_over_from_a_silent_one_that_started_at_about_the_same_time(
    store: FileStore, executor: StoreExecutor, left_s: float
) -> None:
    """It left its last checkpoints to a holder that had died: they were in no store (campaigns 71017, 90301)."""
    dead, going = Pod(store, executor, "dead"), Pod(store, executor, "going")
    await dead.take_over.settle()
    going.started_s = START_TOLERANCE_S / 2
    going.deadline.in_s = left_s
    if left_s < SILENCE_S + UPLOAD_S:
        with pytest.raises(Fenced, match="dead"):
            await going.take_over.settle()
        assert going.now_s == 0
        return
    await going.take_over.settle()
    assert (going.now_s, read(store).holder) == (SILENCE_S, "going")


async def test_a_pod_that_goes_takes_over_at_once_from_one_that_has_ended(store: FileStore, executor: StoreExecutor) -> None:
    """With little time left it left its last checkpoints to a holder that had said that it commits nothing any more."""
    ended, going = Pod(store, executor, "ended"), Pod(store, executor, "going")
    await ended.take_over.settle()
    going.started_s = START_TOLERANCE_S / 2
    going.deadline.in_s = SILENCE_S
    ended.deadline.in_s = 5.0
    await ended.renewal.renew(1)
    with pytest.raises(Fenced, match="ended"):
        await going.take_over.settle()
    await ended.renewal.release()
    again = Pod(store, executor, "going")
    again.started_s, again.deadline.in_s = going.started_s, going.deadline.in_s
    await again.take_over.settle()
    assert (again.now_s, read(store).holder) == (0, "going")


async def test_a_pod_that_goes_does_not_fence_one_that_has_claimed_and_says_so_later(
    store: FileStore, executor: StoreExecutor
) -> None:
    staying, going = Pod(store, executor, "staying"), Pod(store, executor, "going")
    store.put(Claim(1, staying.lease.holder.id).key, b'{"format": 1, "holder": "staying", "age_s": 0.0}')
    going.started_s = START_TOLERANCE_S / 2
    going.deadline.in_s = 20.0
    going.on_sleep = staying.take_over.settle
    with pytest.raises(Fenced, match="staying"):
        await going.take_over.settle()
    await staying.lease.require_not_fenced()


async def test_a_pod_that_started_after_one_that_was_cut_off_takes_over_from_its_late_claim(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.started_s, later.started_s = 1000.0, 500.0
    await earlier.take_over.settle()
    await later.take_over.settle()
    await later.lease.require_not_fenced()
    assert read(store).holder == "later"


class CutOff:
    """A store whose requests of one pod wait at one point, while another pod acts."""

    def __init__(self, store: FileStore, at: int, act: Callable[[], None]) -> None:
        self._store, self._left, self._act = store, at, act

    def __getattr__(self, name: str) -> object:
        method = getattr(self._store, name)
        if name not in ("put", "get", "list", "delete"):
            return method

        def call(*args: object, **kwargs: object) -> object:
            if self._left == 0:
                self._act()
            self._left -= 1
            return method(*args, **kwargs)

        return call


@pytest.mark.parametrize("at", range(13))
@pytest.mark.parametrize("is_held", [False, True])
async def test_of_two_pods_the_later_one_holds_the_prefix_wherever_the_earlier_one_is_cut_off(
    store: FileStore, executor: StoreExecutor, at: int, is_held: bool
) -> None:
    """The earlier pod starts, is cut off at its n-th request, its replacement starts and trains, and its network heals."""
    if is_held:
        await Pod(store, executor, "first").take_over.settle()
    claim(store, run_id=None, job="team/train")
    loop = asyncio.get_running_loop()
    later = Pod(store, executor, "later")
    ages = [0.0]

    def replaces() -> None:
        ages[0] = 100 * START_TOLERANCE_S
        asyncio.run_coroutine_threadsafe(later.take_over.settle(), loop).result()

    cut_off = CutOff(store, 99, replaces)
    earlier = Pod(cut_off, executor, "earlier")  # type: ignore[arg-type]
    cut_off._left = at
    earlier.age_s = lambda: ages[0]  # type: ignore[method-assign]
    with contextlib.suppress(Fenced):
        await earlier.watch.wait_for_ending()
        await earlier.take_over.settle()
        await earlier.lease.require_not_fenced()
    if not later.lease.is_held:  # the earlier one was never cut off
        assert cut_off._left >= 0
        return
    await later.lease.require_not_fenced()
    await later.renewal.renew(round(CHECK_S))
    assert read(store).holder == "later"
    with pytest.raises(Fenced):
        await earlier.lease.require_not_fenced()
    again = Pod(store, executor, "earlier")
    again.started_s = 200 * START_TOLERANCE_S
    with pytest.raises(Fenced):
        await again.take_over.settle()
    await later.lease.require_not_fenced()


async def cut_off_while_another_claims(
    store: FileStore, executor: StoreExecutor, *, at: int, started_s: tuple[float, float], job: str | None = "team/train"
) -> tuple[Pod, Pod, BaseException | None]:
    """Return a pod that was cut off at its n-th request, the pod that took the prefix over then, and the error of the first."""
    claim(store, run_id=None, job=job)
    loop = asyncio.get_running_loop()
    other = Pod(store, executor, "other", job=job)

    def takes_over() -> None:
        asyncio.run_coroutine_threadsafe(other.take_over.settle(), loop).result()

    cut_off = CutOff(store, 99, takes_over)
    pod = Pod(cut_off, executor, "pod", job=job)  # type: ignore[arg-type]
    cut_off._left = at
    pod.started_s, other.started_s = started_s
    other.on_sleep = pod.on_sleep = functools.partial(other.renewal.renew, int(ASK_POLL_S))
    try:
        await pod.take_over.settle()
    except (Fenced, ConfigurationError) as error:
        return pod, other, error
    return pod, other, None


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("older_s", [2 * START_TOLERANCE_S, START_TOLERANCE_S / 2])
async def test_a_replacement_whose_claim_was_written_just_after_that_of_the_earlier_pod_holds_the_prefix(
    store: FileStore, executor: StoreExecutor, at: int, older_s: float
) -> None:
    """Both claimed the same epoch: it was fenced for good, and the earlier pod went on."""
    later, earlier, error = await cut_off_while_another_claims(store, executor, at=at, started_s=(100.0, 100.0 + older_s))
    assert error is None
    await later.lease.require_not_fenced()
    assert read(store).holder == "pod"
    with pytest.raises(Fenced):
        await earlier.lease.require_not_fenced()


async def test_a_replacement_that_died_just_after_its_claim_takes_over_when_it_starts_again(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.started_s = 2 * START_TOLERANCE_S
    await earlier.take_over.settle()
    store.put(Claim(1, later.lease.holder.id).key, b'{"format": 1, "holder": "later", "age_s": 1}')
    await later.take_over.settle()
    await later.lease.require_not_fenced()
    with pytest.raises(Fenced):
        await earlier.lease.require_not_fenced()


async def test_an_earlier_pod_whose_claim_counts_as_the_first_withdraws_it(
    store: FileStore, executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of listings are whole seconds: a late claim may fence a replacement that already holds the prefix."""
    whole = type(store).list

    def lists(self: FileStore, prefix: str) -> object:
        return (dataclasses.replace(stored, modified=f"{stored.modified[:11]}{'0' * 9}") for stored in whole(self, prefix))

    monkeypatch.setattr(FileStore, "list", lists)
    earlier, later, error = await cut_off_while_another_claims(
        store, executor, at=2, started_s=(100.0 + 2 * START_TOLERANCE_S, 100.0)
    )
    assert isinstance(error, Fenced)
    assert not earlier.lease.is_held
    await later.lease.require_not_fenced()


async def test_without_a_name_the_second_of_two_that_claim_at_once_is_refused_and_not_fenced(
    store: FileStore, executor: StoreExecutor
) -> None:
    """Its trainer was told to stop, and its checkpoints waited for ever once the notice was void."""
    second, first, error = await cut_off_while_another_claims(store, executor, at=3, started_s=(100.0, 100.0), job=None)
    assert isinstance(error, ConfigurationError)
    assert "is being written by another job (other)" in str(error)
    assert not second.lease.fenced.is_set()
    await first.lease.require_not_fenced()
    assert [stored.key for stored in store.list(keys.CLAIMS)] == [Claim(1, first.lease.holder.id).key]


async def test_a_slow_store_does_not_make_a_pod_that_flushes_count_as_dead(store: FileStore, executor: StoreExecutor) -> None:
    """Each request takes 15 s: the earlier pod gives a sign of life every 47 s."""
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.take_over.settle()
    earlier.deadline.in_s = 300.0

    class Slow:
        def __init__(self, pod: Pod) -> None:
            self.pod = pod

        def __getattr__(self, name: str) -> object:
            method = getattr(store, name)

            def call(*args: object, **kwargs: object) -> object:
                self.pod.now_s += 15 if args[0] == keys.RUN else 0
                return method(*args, **kwargs)

            return call if name in ("get", "put") else method

    earlier.lease.documents._store, later.lease.documents._store = Slow(earlier), Slow(later)  # type: ignore[assignment]
    await earlier.renewal.renew(1)
    next_s = earlier.now_s

    async def flushes() -> None:
        nonlocal next_s
        if later.now_s >= next_s and earlier.deadline.in_s:
            await earlier.renewal.renew(2)
            next_s = later.now_s + 47
        if later.now_s > 250 and not earlier.lease.is_released:
            await earlier.lease.require_not_fenced()
            await earlier.renewal.release()

    later.on_sleep = flushes
    await later.watch.wait_for_ending()
    assert later.now_s > 250
    assert earlier.lease.is_released
