"""``.ckpt/runs.json`` and ``.ckpt/nodes.json``: the runs that used the volume, and the nodes of their jobs.

So a run takes no checkpoint of another one for its own, and a node no part of a step for all of it.
"""

from __future__ import annotations

import structlog

from sidecar.core.lifecycle import volume_nodes
from sidecar.core.lifecycle.volume_runs import VolumeRun, decode_runs, encode_runs, is_same_run, taken_over
from sidecar.volume.volume import Volume
from trainer_hook.contract import NODES, RUNS, Node

log = structlog.get_logger()

SHOWN = 5
"""Number of checkpoints that the log names."""


def begin(volume: Volume, me: VolumeRun) -> frozenset[str]:
    """Record the present run. Returns the versions of the finished checkpoints that other runs left on the volume.

    Raises:
        OSError: The volume cannot be read now. Nothing was recorded: what is not listed would count as the present run's.
    """
    raw = volume.read_small(RUNS, surely=True)
    before = decode_runs(raw)
    is_alone = all(is_same_run(run, me) for run in before)
    runs = taken_over(before, me, [] if is_alone else volume.all_finished_versions())
    if (content := encode_runs(runs)) != raw:
        try:
            (volume / RUNS).publish(content)
        except OSError as error:
            log.warning("runs_not_written", path=RUNS, error=error.strerror)
    foreign = frozenset().union(*(run.versions for run in runs[1:]))
    if foreign:
        names = [name for name in volume.names() if volume.marker_version(name) in foreign]
        log.warning(
            "checkpoints_of_another_run",
            checkpoints=names[:SHOWN],
            number=len(foreign),
            of=[run.name or run.store for run in runs[1:]],
            hint="they are left alone: delete them, or set the same CKPT_RUN_ID in both runs to go on from them",
        )
    return foreign


def begin_node(volume: Volume, me: Node | None) -> dict[str, Node | None]:
    """Record the present node. Returns the node of each finished checkpoint that another one left, by its version.

    Raises:
        OSError: The volume cannot be read now. Nothing was recorded: what is not listed would count as the present node's.
    """
    raw = volume.read_small(NODES, surely=True)
    before = volume_nodes.decode_nodes(raw)
    is_alone = all(known.node == me for known in before)
    nodes = volume_nodes.taken_over(before, me, [] if is_alone else volume.all_finished_versions())
    if (content := volume_nodes.encode_nodes(nodes)) != raw:
        try:
            (volume / NODES).publish(content)
        except OSError as error:
            log.warning("nodes_not_written", path=NODES, error=error.strerror)
    return volume_nodes.node_of_versions(nodes)
