"""The tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.cost import Cost, median
from benchmarks.peers import PEERS
from benchmarks.stores import LINK_MBIT_PER_S, LINK_ROUND_TRIP_MS

OURS, LIMIT = "ours", "wire"
GIB = 1 << 30
MIB = 1 << 20
TOO_SMALL_BYTES = 16 * MIB
"""Below this size CPU time is not given per GiB, which would be meaningless."""
WHERE = {
    "sink": "an S3 sink, HTTP",
    "sink-tls": "an S3 sink, TLS",
    "rgw": "Ceph RGW on the same machine",
    "link": f"an S3 sink over {LINK_MBIT_PER_S} Mbit/s with a round trip of {LINK_ROUND_TRIP_MS} ms",
}


@dataclass
class Result:
    """Costs of all clients with one store, direction and kind of files."""

    store: str
    direction: str
    work: str
    size_bytes: int
    rounds: int
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    starts: dict[str, list[Cost]] = field(default_factory=dict)
    """Cost of the start of each client; a client is missing if its ``costs`` do not include a start."""
    failed: dict[str, str] = field(default_factory=dict)

    def medians(self) -> dict[str, Cost]:
        """Return the cost of the transfer for each client that ran, without its start."""
        costs = {name: median(measured) for name, measured in self.costs.items() if name not in self.failed}
        return {n: cost.beyond(median(self.starts[n])) if n in self.starts else cost for n, cost in costs.items()}


def table(result: Result) -> str:
    """Return medians, and in brackets their ratios to ours and to the limit."""
    costs = result.medians()
    is_small = result.size_bytes < TOO_SMALL_BYTES
    gib = 1.0 if is_small else result.size_bytes / GIB
    columns = {
        "CPU s" if is_small else "CPU s/GiB": {name: cost.cpu_s / gib for name, cost in costs.items()},
        "peak RSS MiB": {name: cost.peak_rss_mib for name, cost in costs.items()},
        "wall s": {name: cost.wall_s for name, cost in costs.items()},
    }
    arrow = "to" if result.direction == "up" else "from"
    lines = [
        f"\n{result.direction} {result.work}, {result.size_bytes / MIB:.1f} MiB, {arrow} {WHERE[result.store]}; "
        f"medians of {result.rounds} rounds; (times ours, times the limit)\n",
        f"{'':<10}" + "".join(f"{title:>26}" for title in columns),
    ]
    by_time = sorted(costs, key=lambda name: costs[name].wall_s)
    lines += [f"{name:<10}" + "".join(f"{_cell(name, values):>26}" for values in columns.values()) for name in by_time]
    lines += [f"{name:<10}  {why}" for name, why in result.failed.items()]
    if OURS in costs:
        lines.append(
            f"ours: the whole process, {costs[OURS].idle_rss_mib:.0f} MiB of it before the transfer; nothing subtracted."
        )
    lines += [f"{name}: {PEERS[name].what}." for name in costs if name in PEERS]
    return "\n".join(lines)


def _cell(name: str, values: dict[str, float]) -> str:
    return f"{values[name]:.2f} ({_ratio(values, name, OURS)}, {_ratio(values, name, LIMIT)})"


def _ratio(values: dict[str, float], name: str, other: str) -> str:
    return f"{values[name] / values[other]:.1f}" if values.get(other) else "–"
