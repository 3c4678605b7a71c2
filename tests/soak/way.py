"""The way to a store that is never quite well, and counts what passes."""

from __future__ import annotations

from collections import Counter

from tests.campaign.proxy import StoreProxy, Trouble
from tests.faults.proxy import Exchange
from tests.faults.wire import Peer

STEADY = {
    "reset": 0.006,
    "503": 0.006,
    "500": 0.004,
    "429": 0.004,
    "answer lost": 0.004,
    "closed when kept": 0.01,
    "stalled": 0.004,
}
"""Share of the requests that each trouble meets, always."""
SILENT_SHARE = 0.001
BURST_EVERY_S = 30.0
BURSTS = (("503", 2.0), ("slow", 4.0), ("reset", 1.0), ("refused", 1.0))
"""In turns: a store that refuses all, a slow link, connections that end, and none."""
MOST_KEPT = 1000


def troubles(length_s: float) -> list[Trouble]:
    """Return what is wrong with the way in a run of this length: the same in each of its thirds."""
    found = [Trouble(kind, 0.0, length_s, share, 1.5) for kind, share in STEADY.items()]
    found.append(Trouble("silent requests", 0.0, length_s, SILENT_SHARE))
    begin_s = BURST_EVERY_S / 2
    while begin_s < length_s:
        kind, for_s = BURSTS[int(begin_s / BURST_EVERY_S) % len(BURSTS)]
        found.append(Trouble(kind, begin_s, for_s))
        begin_s += BURST_EVERY_S
    return found


class CountingProxy(StoreProxy):
    """Counts requests by operation, and keeps no list of them."""

    def __init__(self, target: str, seed: int) -> None:
        super().__init__(target, seed)
        self.asked: Counter[str] = Counter()

    def _exchange(self, client: Peer, exchange: Exchange) -> bool:
        self.asked[exchange.operation] += 1
        if len(self.log) > MOST_KEPT:
            self.log.clear()
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        return super()._exchange(client, exchange)
