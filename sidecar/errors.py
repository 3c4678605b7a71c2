"""Everything that this program raises on purpose.

    SidecarError
    ├─ ConfigurationError      a setting or the environment: the start ends with exit code 2
    ├─ CheckpointRejected      a directory on the volume that is not a valid checkpoint
    ├─ CheckpointChanged       a file was rewritten while it was being read
    ├─ UnreadableFile          the volume failed while a file was read: tried again
    ├─ Stopped                 asked to stop at the next block or part; nothing is wrong
    └─ StoreError
       ├─ NotFound             no such object or upload
       ├─ AlreadyExists        a conditional write met an object
       ├─ CorruptObject        bytes differ from what their writer recorded
       ├─ AccessRefused        credentials, bucket, TLS, clock: waits for a person, and is tried again all the same
       └─ StoreUnavailable     network, timeout, 5xx: tried again
          └─ StoreBusy         it asks for fewer requests (SlowDown): tried again, with fewer at once

Each text names the object, what was wrong and the next step. ``StoreError.transient`` says whether trying again can help.
"""

from __future__ import annotations


class SidecarError(Exception):
    """Base of the tree above."""


class ConfigurationError(SidecarError):
    """Something that must be changed outside before a start can succeed."""


class CheckpointRejected(SidecarError):
    """A checkpoint directory that cannot be taken as it is; the text is the reason."""


class CheckpointChanged(SidecarError):
    """A pinned file was rewritten in place while it was being read."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} was rewritten while it was being read; it is read again from the start")
        self.path = path


class UnreadableFile(SidecarError):
    """The volume did not give a file's bytes."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}: is the volume still sound? It is tried again")
        self.path = path


class Stopped(SidecarError):
    """The work was asked to stop."""


class StoreError(SidecarError):
    """A request to the store did not succeed."""

    transient = False


class NotFound(StoreError):
    """The store has no object or unfinished upload of this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: not in the store")
        self.key = key


class AlreadyExists(StoreError):
    """A write that must not replace anything met an existing object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: already in the store")
        self.key = key


class CorruptObject(StoreError):
    """Bytes are not those that their writer recorded."""

    def __init__(self, key: str, *, want: str, got: str) -> None:
        super().__init__(f"{key}: {got}, its writer recorded {want}")
        self.key = key
        self.want = want
        self.got = got


class AccessRefused(StoreError):
    """The store answers, but not to us."""


class StoreUnavailable(StoreError):
    """The store does not answer, or asks to come back later."""

    transient = True


class StoreBusy(StoreUnavailable):
    """The store asks for fewer requests."""
