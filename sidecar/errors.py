"""Errors that cross packages.

    SidecarError
    ├─ ConfigurationError      a setting or the environment: the start ends with exit code 2
    ├─ RequestRefused          a person's request that would harm a live run or a checkpoint
    ├─ NothingFound            a person's request names no checkpoint, or none that can be used
    ├─ CheckpointRejected      a directory on the volume that is not a valid checkpoint
    ├─ NeverDurable            a checkpoint whose documents no reader would take: it is rejected
    ├─ CheckpointChanged       a file was rewritten while it was being read
    ├─ UnreadableFile          the volume failed while a file was read, or the rights are missing: tried again
    ├─ Stopped                 asked to stop at the next block or part; nothing is wrong
    │  └─ Fenced               a later pod of the job holds the prefix: nothing is committed or deleted any more
    └─ StoreError
       ├─ NotFound             no such object or upload
       ├─ AlreadyExists        a conditional write met an object
       ├─ Unstorable           a file that the store never takes: its checkpoint is rejected
       │  ├─ TooLarge          for its size
       │  └─ ImpossibleKey     for its name
       ├─ CorruptObject        bytes differ from what their writer recorded
       ├─ UnreadableObject     they do at each read, and yet the store says that it holds what was recorded
       ├─ RefusedObject        the store refuses it again and again, and gives out another one: it may be granted later
       ├─ UnusableNow          there, and whole as far as is known, but not to be used now: it stays as it is
       │  ├─ ArchivedObject    in an archive: the store gives it out only after somebody restored it
       │  └─ LaterFormat       a document of a later version of this system
       ├─ OversizedDocument    a document larger than any that this system writes: as corrupt as one that does not parse
       ├─ UnreadableRun        ``run.json`` is not this system's any more: read again until the holder has rewritten it
       │  └─ LaterRun          it is a later version's: nobody rewrites it
       ├─ Undeclared           node 0 has not declared the attempt its own yet: tried again
       ├─ AccessRefused        credentials, bucket, TLS, clock: waits for a person, and is tried again all the same
       │  ├─ SettingRequired   the bucket's policy wants what a setting brings
       │  ├─ NoCredentials     there are none, or they cannot be fetched
       │  ├─ StoreFull         a quota or a disk of the store: others may free space, too
       │  ├─ UntrustedStore    TLS failed: an unknown authority, or no TLS at all
       │  └─ PartRefused       a part that the store does not take, such as for its number: the file is sent in fewer parts
       └─ StoreUnavailable     network, timeout, 5xx: tried again
          ├─ NoFolder          the store's folder is missing: a sidecar waits for its volume, a person is told at once
          └─ StoreBusy         it asks for fewer requests (SlowDown): tried again, with fewer at once

Each text names the object, what was wrong and the next step. ``StoreError.transient`` says whether trying again can help.
"""

from __future__ import annotations

from trainer_hook.contract import ContractError, LaterFormatError


class SidecarError(Exception):
    """Base of the tree above."""


class ConfigurationError(SidecarError):
    """Something that must be changed outside before a start can succeed."""


class RequestRefused(SidecarError):
    """A person's request would harm a live run or a checkpoint; the text says what to do instead."""


class NothingFound(SidecarError):
    """There is no checkpoint as requested; the text says what was found."""


class CheckpointRejected(SidecarError):
    """A checkpoint directory that cannot be taken as it is; the text is the reason."""


class NeverDurable(SidecarError):
    """A checkpoint of which no commit can be written as it is; the text is the reason and the next step."""


class CheckpointChanged(SidecarError):
    """A pinned file was rewritten in place while it was being read."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} was rewritten while it was being read; it is read again from the start")
        self.path = path


class UnreadableFile(SidecarError):
    """The volume did not give a file's bytes, or this user may not read them."""


class Stopped(SidecarError):
    """The work was asked to stop."""


class Fenced(Stopped):
    """A later pod of the job has taken the prefix over."""


class StoreError(SidecarError):
    """A request to the store did not succeed."""

    transient = False


class NotFound(StoreError):
    """The store has no object or unfinished upload of this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: not in the store")


class AlreadyExists(StoreError):
    """A write that must not replace anything met an existing object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: already in the store")


class Unstorable(StoreError):
    """The store never takes this file."""


class TooLarge(Unstorable):
    """The store takes no object as large as this file."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key} is too large for one object ({why}): save it in several files (shards)")


class ImpossibleKey(Unstorable):
    """The store takes no object of this name."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: the store takes no object of this name ({why}): shorten the path")


class CorruptObject(StoreError):
    """Bytes are not those that their writer recorded."""

    def __init__(self, key: str, *, want: str, got: str) -> None:
        super().__init__(f"{key}: {got}, its writer recorded {want}")
        self.got = got


class UnreadableObject(StoreError):
    """Nothing is known against an object, and its bytes arrive damaged all the same: it may be read again later."""

    def __init__(self, why: str, *, reads: int, for_s: float) -> None:
        super().__init__(
            f"{why}, at each of {reads} reads within {for_s:.0f} s, and the store says nothing against it: "
            "look at the network path, or at the store's disks; the next request tries it again"
        )


class RefusedObject(StoreError):
    """A refusal that is not one of credentials or network: the store answers other requests of the same kind."""

    def __init__(self, why: str, *, tries: int, for_s: float) -> None:
        super().__init__(
            f"{why}, at each of {tries} tries within {for_s:.0f} s, while the store gave out run.json of the same prefix: "
            "look at the object's own permissions or key (owner, ACL, KMS); the next request tries it again"
        )


class UnusableNow(StoreError):
    """An object that is there, and whole as far as is known, and cannot be used now: it is neither replaced nor deleted."""


class LaterFormat(UnusableNow):
    """A document that a later version of this system wrote."""

    def __init__(self, error: LaterFormatError) -> None:
        super().__init__(f"{error}; it stays as it is")


class ArchivedObject(UnusableNow):
    """The store has an object in an archive and does not give it out: trying again helps once somebody restored it."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{key}: archived, by a lifecycle rule of the bucket most likely: restore it from the archive (RestoreObject), "
            "and except the prefix from that rule"
        )


class OversizedDocument(StoreError, ContractError):
    """A foreign document in the store: it is not read, and counts as one that does not parse."""

    def __init__(self, key: str, *, most_bytes: int, size_bytes: int) -> None:
        super().__init__(f"{key}: {size_bytes} bytes, and this document has {most_bytes} at most: delete it")
        self.size_bytes = size_bytes


class UnreadableRun(StoreError):
    """``run.json`` does not parse. ``size_bytes``: if it is too large to be read."""

    def __init__(self, url: str, *, size_bytes: int | None = None) -> None:
        size = f" ({size_bytes} bytes)" if size_bytes is not None else ""
        super().__init__(
            f"{url} is not this system's{size}: choose an empty prefix in CKPT_STORE. If the prefix holds this run's "
            "checkpoints, the document was overwritten: delete it, and it is written again"
        )


class LaterRun(UnreadableRun):
    """A later version of this system holds the prefix, or held it last."""

    def __init__(self, url: str, error: LaterFormatError) -> None:
        StoreError.__init__(self, f"{url}: {error}. Nothing is written below it until then")


class Undeclared(StoreError):
    """``run.json`` does not have the attempt at this moment, and no other one has taken its place; the text says why."""


class AccessRefused(StoreError):
    """The store answers, but not to us. ``code``: S3's name of the reason; ``None``: it was not the store that said so."""

    def __init__(self, text: str, *, code: str | None = None) -> None:
        super().__init__(text)
        self.code = code


class SettingRequired(AccessRefused):
    """The bucket's policy denies writes without what a setting brings; the text names it."""


class NoCredentials(AccessRefused):
    """There are no credentials, or they cannot be fetched."""


class StoreFull(AccessRefused):
    """The store takes no more bytes: space is freed, or a quota raised, without a change of settings."""


class UntrustedStore(AccessRefused):
    """TLS failed: the certificate's authority is unknown, or the server does not speak TLS."""


class PartRefused(AccessRefused):
    """The store takes no such part."""

    def __init__(self, key: str, code: str) -> None:
        super().__init__(f"{key}: the store refused a part ({code})", code=code)


class StoreUnavailable(StoreError):
    """The store does not answer, or asks to come back later."""

    transient = True


class NoFolder(StoreUnavailable):
    """The folder of a folder store is missing, or cannot be made."""


class StoreBusy(StoreUnavailable):
    """The store asks for fewer requests."""
