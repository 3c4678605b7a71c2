"""Take-over of a prefix: the claim, and the choice between two pods that claim it at the same time."""

from __future__ import annotations

import contextlib

import structlog

from sidecar.core.lifecycle.fencing import (
    MOST_EPOCH,
    TWO_AT_ONCE_HINT,
    Arrival,
    Claim,
    Claimed,
    ClaimState,
    Tie,
    after_tie,
    claim_state,
    has_ended,
    next_claim,
    obsolete,
    rivals,
    started_later,
    takeovers_in_turns,
)
from sidecar.core.lifecycle.prefix_ownership import SILENCE_S, Ownership, Run, may_hold
from sidecar.errors import ConfigurationError, Fenced, StoreError, UnreadableRun
from sidecar.lifecycle.holder_watch import TICK_S, HolderWatch
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.lifecycle.renewal import Renewal

log = structlog.get_logger()

MOST_TRIES = 16
"""Number of claims that a pod writes while others take the same epoch first."""


def two_at_once(url: str, run: Run) -> ConfigurationError:
    """Return the error of a pod beside which another one, of another job as far as is known, writes the prefix."""
    return ConfigurationError(
        f"{url} is being written by another job ({run.job or run.holder}) at this "
        "moment: give each run its own prefix in CKPT_STORE. Is it an earlier pod of this job? Then set "
        "CKPT_RUN_ID or JOB_NAME for both. Is it another node of this job? Then set CKPT_NODE_INDEX and "
        "CKPT_NODE_COUNT"
    )


def _say_not_taken_over(claimed: Claimed | None) -> None:
    log.warning(
        "prefix_not_taken_over", holder=claimed and claimed.holder, reason="it started after this pod, which is the earlier one"
    )


class TakeOver:
    """Gets the lease of a prefix, one step after the other. It fences others only by ``claim``."""

    def __init__(self, lease: PrefixLease, renewal: Renewal, watch: HolderWatch) -> None:
        self._lease, self._documents = lease, lease.documents
        self._executor, self._deadline, self._clock = lease.executor, lease.deadline, lease.clock
        self._renewal = renewal
        self._watch = watch

    @property
    def is_at_once(self) -> bool:
        """Whether the holder, alive or not, is of the same run: this pod is the later one."""
        return self._lease.holder.is_of(self._documents.run)

    @property
    def is_ours_unasked(self) -> bool:
        """Whether no other job can hold the prefix, as far as ``run.json`` alone says it."""
        run, me = self._documents.run, self._lease.holder
        return self.is_at_once or may_hold(run, run, me=me.name, job=me.job, watched_s=0) is Ownership.OURS

    async def settle(self) -> None:
        """Take the prefix over, if it is another pod's: at once from a pod of the same job, else once its holder is silent.

        If told to end too early to know that, it does not: another job may hold it (``settle_later``).

        Raises:
            ConfigurationError: Another job holds the prefix.
            Fenced: A later pod of this job holds it already.
            UnreadableRun: ``run.json`` is not this system's any more.
        """
        lease = self._lease
        if not self.is_at_once:
            match await self._watch.ownership(job=lease.holder.job):
                case Ownership.TWO_AT_ONCE:
                    raise two_at_once(self._documents.url, self._documents.run)
                case Ownership.WATCH:
                    return
        claims = await self.claim()
        if claims is None:
            raise await lease.fence()
        async with lease.writes:
            await self._hold(claims)

    async def settle_later(self) -> None:
        """Take the prefix over if ``settle`` left it to a holder that may be alive, and the termination notice is withdrawn.

        Raises:
            ConfigurationError, UnreadableRun: As ``settle``.
        """
        with contextlib.suppress(Fenced):  # said by those who wait for ``fenced``
            while not self._lease.is_held and not self._lease.fenced.is_set():
                await self._clock.sleep(TICK_S)
                if not self._deadline.is_set():
                    await self.settle()

    async def _hold(self, claims: list[Claim]) -> None:
        """Write ``run.json`` as the holder, whose claim is the last one."""
        lease = self._lease
        lease.claim = claim = claims[-1]
        # This pod may have been cut off since its claim.
        run, _ = await self._executor.together((self._executor.persistently(lease.read_run), lease.require_highest_claim()))
        is_other = run.holder != lease.holder.name
        if is_other and run.holder is not None:
            log.info("prefix_taken_over", earlier=run.holder, epoch=claim.epoch)
        lease.attempts.declared = (lease.attempts.take_over(run) if is_other else run).attempts
        await self._executor.persistently(self._renewal.beat, run)
        if old := obsolete(claims):
            with contextlib.suppress(StoreError):
                await self._executor.once(self._documents.delete_claims, old)

    async def claim(self) -> list[Claim] | None:
        """Claim the prefix, unless a later pod holds it.

        Returns:
            All claims, this pod's last; ``None``: a later pod holds the prefix.

        Raises:
            ConfigurationError: Another pod, which may be another job's, claimed it at the same time.
        """
        documents, me, claims_again = self._documents, self._lease.holder, False
        for _ in range(MOST_TRIES):
            # First the run: its epoch must not be that of a claim that this pod has not seen.
            run = await self._watch.read_run()
            claims = await self._executor.persistently(documents.claims)
            match claim_state(claims, me.id):
                case ClaimState.HOLDER:
                    return claims
                case ClaimState.FENCED if not claims_again and not await self._may_come_back():
                    return None
                case _ if claims and await self._leaves_it_to(claims[-1]):
                    return None
            claim = next_claim(claims, me.id, known_epoch=run.epoch)
            if claim.epoch > MOST_EPOCH:
                raise UnreadableRun(f"{documents.url}/{claims[-1].key}")
            await self._executor.persistently(documents.put_claim, claim, me, self._lease.pod)
            claims = await self._claims_with(claim)
            if claim_state(claims, me.id) is ClaimState.HOLDER and not await self._gives_way(claims):
                self._warn_of_turns(claims)
                return claims
            # Another pod wrote its claim since this one looked. If it did not know of this pod, it has the same epoch.
            if claims[-1].epoch != claim.epoch:
                return None
            is_earlier = claims[-1] == claim or await self._is_earlier_than(claims[-1])
            tie = after_tie(is_same_run=me.is_of(run), is_earlier=is_earlier)
            claims_again = tie is Tie.CLAIM_AGAIN  # the holder of a higher epoch, too, may have started before this pod
            if not claims_again:
                await self._executor.persistently(documents.delete_claims, [claim])
                if tie is Tie.TWO_AT_ONCE:
                    raise two_at_once(documents.url, await self._watch.read_run())
                return None
        return None

    async def _may_come_back(self) -> bool:
        """Whether this pod, which was fenced, is a machine that may be used again, and the holder is silent."""
        if self._lease.holder.is_unique:
            return False
        return await self._watch.was_silent() or await self._watch.ownership(job=None) is Ownership.OURS

    async def _gives_way(self, claims: list[Claim]) -> bool:
        """Whether the pod of a claim with the epoch of this pod's, which is the highest, is known to have started later.

        It may have seen its claim as the highest before this pod's was listed: then it does not claim again.
        """
        for rival in rivals(claims, claims[-1]) if self.is_at_once else ():
            if await self._is_earlier_than(rival, is_ending=False):
                return True
        return False

    async def _claims_with(self, claim: Claim) -> list[Claim]:
        """Return all claims once this pod's own one is listed, which some stores show late."""
        for _ in range(MOST_TRIES):
            claims = await self._executor.persistently(self._documents.claims)
            if claim in claims:
                return claims
            await self._clock.sleep(TICK_S)
        return claims or [claim]

    async def _leaves_it_to(self, highest: Claim) -> bool:
        """Whether this pod leaves the prefix to the pod of the highest claim, as the later one.

        A terminating pod also leaves it to one that started at about the same time, unless that one has ended or is silent.
        """
        claimed, arrival = await self._starts(highest)
        is_ending = self._deadline.is_set()
        if not started_later(highest, claimed, arrival, is_ending=is_ending):
            return False
        if is_ending and not started_later(highest, claimed, arrival):
            if has_ended(await self._watch.read_run(), highest):
                return False
            if await self._watch.is_silent():
                log.info("holder_is_silent", holder=claimed and claimed.holder, waited_s=SILENCE_S)
                return False
        _say_not_taken_over(claimed)
        return True

    async def _is_earlier_than(self, highest: Claim, *, is_ending: bool | None = None) -> bool:
        """Whether the pod of a claim started after this one. ``is_ending``: this pod is terminating; ``None``: as it is."""
        claimed, arrival = await self._starts(highest)
        is_ending = self._deadline.is_set() if is_ending is None else is_ending
        is_earlier = started_later(highest, claimed, arrival, is_ending=is_ending)
        if is_earlier:
            _say_not_taken_over(claimed)
        return is_earlier

    async def _starts(self, highest: Claim) -> tuple[Claimed | None, Arrival | None]:
        """Return what the store's clock shows of the starts of a claim's pod and of this one."""
        ask = self._executor.persistently
        asked = ask(self._documents.claimed, highest), ask(self._documents.arrive, self._lease.holder, self._lease.pod)
        claimed, arrival = await self._executor.together(asked)
        return claimed, arrival

    def _warn_of_turns(self, claims: list[Claim]) -> None:
        if turns := takeovers_in_turns(claims):
            log.warning(
                "prefix_taken_over_in_turns",
                takeovers=turns,
                hint=f"if two pods of this job run at once on purpose, {TWO_AT_ONCE_HINT}; else look at why they are replaced",
            )
