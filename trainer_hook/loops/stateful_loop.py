"""A loop that saves named objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.contract import META_OWN_SHARDS
from trainer_hook.loops import state_files
from trainer_hook.loops.loop import Loop
from trainer_hook.process.log import info
from trainer_hook.saving.async_save import background_for


class StatefulLoop(Loop):
    """A loop with named objects that have ``state_dict`` and ``load_state_dict``."""

    def __init__(self, objects: Mapping[str, Any], sampler: Any = None) -> None:
        """``None`` among the objects stands for one that is not used.

        Raises:
            TypeError: An object has no state.
        """
        super().__init__(sampler)
        self._objects = {name: thing for name, thing in objects.items() if thing is not None}
        for name, thing in self._objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"{name}: {type(thing).__name__} has no state_dict() and load_state_dict()")
        self._save_group: Any = None

    def _obstacle(self) -> str | None:
        """Return the name of a library or strategy that rules out asynchronous saves; ``None``: they are possible."""
        return None

    def _background(self) -> Background | None:
        assert self._session is not None
        consensus, sharded = self._session.join(), state_files.is_sharded(self._objects)
        ranks = consensus.world.local_size if sharded else 1
        background = background_for(self._session.settings, self._obstacle(), ranks=ranks)
        if background is not None and sharded:
            self._save_group = consensus.new_group()  # a thread ends the save on it, while this thread uses the other group
        return background

    def _large_objects(self) -> Sequence[Any]:
        saves = self._world.rank == 0 or state_files.is_sharded(self._objects)
        return list(self._objects.values()) if saves else []

    def _write(self, folder: Path) -> None:
        self._write_objects(self._objects, folder)

    def _write_objects(self, objects: Mapping[str, Any], folder: Path) -> None:
        state_files.write(state_files.collect(objects), folder, rank=self._world.rank, group=self._save_group or self._group)

    def _about(self) -> dict[str, Any]:
        return {"objects": sorted(self._objects)}

    def _meta(self) -> dict[str, Any]:
        alike = state_files.is_sharded(self._objects) and state_files.reads_own_shards(self._objects, self._world.size)
        return {META_OWN_SHARDS: True} if alike else {}

    def _reads_all(self) -> bool:
        session = self._session
        size = 1 if session is None else session.join().world.size
        return not state_files.reads_own_shards(self._objects, size)

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        saved = progress.get("objects", [])
        if lacking := sorted(set(self._objects) - set(saved)):
            raise state_files.StateMismatch(
                f"{folder.name} holds {', '.join(saved)}, but not {', '.join(lacking)}: "
                "resume with the objects that were saved, or begin anew under another CKPT_STORE prefix"
            )
        if unused := sorted(set(saved) - set(self._objects)):
            info(f"{folder.name}: {', '.join(unused)} is in the checkpoint, but this run has no such object")
        state_files.load(self._objects, folder, group=self._group)

    @property
    def _group(self) -> Any:
        return None if self._session is None else self._session.join().group
