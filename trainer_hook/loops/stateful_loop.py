"""A loop with named objects that have a state, and with what a library saves by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.contract import META_OWN_SHARDS
from trainer_hook.loops import state_files
from trainer_hook.loops.loop import Loop
from trainer_hook.process.log import say
from trainer_hook.process.session import Session
from trainer_hook.saving.async_save import background_for


class StatefulLoop(Loop):
    """A loop with named objects that have ``state_dict`` and ``load_state_dict``."""

    def __init__(self, objects: Mapping[str, Any], sampler: Any = None) -> None:
        """``None`` among the objects stands for one that this run does not use.

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
        """Return with what saves beside training are not available, if so."""
        return None

    def _background(self, session: Session) -> Background | None:
        agreement, sharded = session.join(), state_files.is_sharded(self._objects)
        ranks = agreement.world.local_size if sharded else 1
        background = background_for(session.settings, self._obstacle(), ranks=ranks)
        if background is not None and sharded:
            self._save_group = agreement.new_group()  # ranks end a save on it in a thread, while they agree on other things
        return background

    def _large(self) -> Sequence[Any]:
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
            raise state_files.DoesNotFit(
                f"{folder.name} holds {', '.join(saved)}, but not {', '.join(lacking)}: "
                "resume with the objects that were saved, or begin anew under another CKPT_STORE prefix"
            )
        if unused := sorted(set(saved) - set(self._objects)):
            say(f"{folder.name}: {', '.join(unused)} is there, but nothing to load it into")
        state_files.load(self._objects, folder, group=self._group)

    @property
    def _group(self) -> Any:
        return None if self._session is None else self._session.join().group
