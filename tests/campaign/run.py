"""One run: its store, its proxy, what was published, and what was found."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import servers
from tests.campaign.plan import Story
from tests.campaign.proxy import StoreProxy
from tests.campaign.published import Published, Version
from tests.campaign.reader import Bucket, Folder, Reader, step_of
from tests.campaign.witness import Witness
from tests.process.sidecar_process import Sidecar

BUCKET = "campaign"
HEALED_S = 150.0
"""Longest time from the end of all faults to the commit of the newest checkpoint: requests that fell silent, pauses between
retries, and a machine that does several runs at once."""
SHARE_S = 2.0
"""Runnable processes per core from which time limits are extended, in proportion to the load."""
TRACES = ("Traceback (most recent call last)", "exception was never retrieved", "was never awaited")


@dataclass
class Run:
    """What a director works with, and where it says what is wrong."""

    story: Story
    folder: Path
    reader: Reader
    published: Published
    proxy: StoreProxy | None
    witness: Witness | None
    settings: dict[str, str]
    """Of all sidecars."""
    target: str | None = None
    """Endpoint of the store itself; ``None``: a folder."""
    tls: ssl.SSLContext | None = None
    proxies: list[StoreProxy] = field(default_factory=list)
    """Of single nodes."""
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    began_s: float = field(default_factory=time.monotonic)
    durable_after_s: float | None = None
    """From the end of all faults to the commit of the newest."""
    digest: str | None = None
    """Of the weights of a real trainer."""

    def note(self, text: str) -> None:
        """Say what happens now."""
        self.notes.append(f"{time.monotonic() - self.began_s:7.2f} {text}")
        with (self.folder / "story.txt").open("a") as file:
            file.write(f"{self.notes[-1]}\n")

    def violation(self, text: str) -> None:
        self.violations.append(text)
        self.note(f"VIOLATION {text}")

    def is_committed(self, version: Version) -> bool:
        return self._committed(version.name) == version

    def is_committed_or_newer(self, version: Version, *, or_later: bool = False) -> bool:
        """Whether a version is committed, one that its trainer wrote over it since, or a later step that supersedes it.

        ``or_later``: any later step of its pod does.
        """
        found = self._committed(version.name)
        if found is not None and self.published.is_not_before(found, version):
            return True
        later = [name for name in self.reader.names() if step_of(name) > step_of(version.name)]
        skips = or_later or self.story.settings.get("CKPT_SUPERSEDED") == "skip"
        return skips and any((step := self._committed(name)) is not None and step.pod == version.pod for name in later)

    def _committed(self, name: str) -> Version | None:
        commit = self.reader.commit(name)
        return self.published.of_commit(commit) if commit is not None and commit.is_whole else None

    def heal(self) -> None:
        for proxy in self._all_proxies():
            proxy.heal()
        self.note("all faults end")

    def _all_proxies(self) -> list[StoreProxy]:
        return [*([self.proxy] if self.proxy else []), *self.proxies]

    @contextlib.contextmanager
    def way_of_its_own(self, number: int) -> Iterator[tuple[StoreProxy | None, dict[str, str]]]:
        """Yield a proxy of one pod, and the settings with which its sidecar goes through it."""
        if self.target is None:
            yield None, {}
            return
        proxy = StoreProxy(self.target, self.story.seed * 100 + number, tls=self.tls, dialect=self.witness)
        if self.witness is not None:
            proxy.on_answer = self.witness.answered
        self.proxies.append(proxy)
        with proxy.running() as endpoint:
            yield proxy, {"AWS_S3_ENDPOINT": endpoint}

    def check_store(self) -> None:
        """Read all commits: I1 to I6 at the end."""
        names = self.reader.names()
        if not names:
            self.violation("nothing is committed, though the store is healthy")
        for name in names:
            commit = self.reader.commit(name)
            if commit is None:
                self.violation(f"{name}: its commit changes while nothing runs")
            elif not commit.is_whole and self.reader.quarantined(commit):
                self.figures["damaged commits quarantined"] += 1  # by a late request: the witness checks what was committed
            elif not commit.is_whole:
                self.violation(f"I2: {name}: {'; '.join(commit.problems[:4])}")
            elif self.published.of_commit(commit) is None:
                self.violation(f"{name} is committed with content that nobody published: {commit.nodes}")
            elif self.reader.quarantined(commit):
                self.violation(f"{name} is whole, and quarantined")
            else:
                self.figures["commits verified"] += 1
        self.note(f"committed: {names}")

    def check_resumed(self, answer: Mapping[str, Any], volume: Path, *, node: int = 0, of: str | None) -> Version | None:
        """Compare what a resume gave with what was published. ``of``: the checkpoint that it must be, if any."""
        if answer["state"] != "ready":
            if of is not None:
                self.violation(f"a resume of {of} answered {answer['state']}: {answer.get('detail')}")
            return None
        name = str(answer["checkpoint"])
        if of is not None and name != of:
            self.violation(f"a resume gave {name}, and {of} is the newest: {answer.get('passed_over')}")
        version = self.published.of_folder(volume / name, node=node)
        if version is None:
            self.violation(f"a resume of {name} gave content that nobody published")
        else:
            self.figures["resumes verified"] += 1
            self.figures["bytes resumed"] += sum(size for files in version.nodes.values() for size, _ in files.values())
        return version

    def check_logs(self) -> None:
        for log in self.folder.glob("*.log"):
            text = log.read_text(errors="replace")
            for trace in TRACES:
                if trace in text:
                    self.violation(f"{log.name}: {trace}: {text[text.index(trace) :][:1500]}")
                    break

    def close(self) -> None:
        """Count what happened."""
        if self.witness is not None:
            self.violations += self.witness.violations
            self.figures.update({f"{what} seen": count for what, count in self.witness.seen.items()})
        for proxy in self._all_proxies():
            self.faults += proxy.harmed
            self.figures["requests"] += len(proxy.log)
        self.figures["bytes verified"] += self.reader.verified_bytes

    def newest(self) -> str | None:
        found = self.reader.newest_whole()
        return None if found is None else found.name


@contextlib.contextmanager
def opened(story: Story, folder: Path, endpoints: Mapping[str, str], tls: tuple[ssl.SSLContext, Path] | None) -> Iterator[Run]:
    """Make a run's own prefix, and a proxy before its store."""
    prefix = f"run-{story.seed}-{uuid.uuid4().hex[:8]}"
    published = Published()
    if story.store == "file":
        (folder / "store").mkdir()
        settings = story.settings | {"CKPT_STORE": f"file://{folder / 'store'}"}
        yield Run(story, folder, Reader(Folder(folder / "store")), published, None, None, settings)
        return
    reader = Reader(Bucket(endpoints[story.store], BUCKET, prefix, keys=(servers.ACCESS_KEY, servers.SECRET_KEY)))
    keep = story.settings.get("CKPT_KEEP_STORE")
    witness = Witness(prefix, reader, published, keep=int(keep) if keep else None)
    context, certificate = tls if tls and story.tls else (None, None)
    proxy = StoreProxy(endpoints[story.store], story.seed, tls=context, dialect=witness)
    proxy.on_answer = witness.answered
    with proxy.running() as endpoint:
        settings = story.settings | {
            "CKPT_STORE": f"s3://{BUCKET}/{prefix}",
            "AWS_S3_ENDPOINT": endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_DEFAULT_REGION": servers.REGION,
        }
        settings |= {"CKPT_CA_BUNDLE": str(certificate)} if certificate else {}
        yield Run(story, folder, reader, published, proxy, witness, settings, endpoints[story.store], context)
    if not witness.violations:
        reader.objects.clear()


def patience(limit_s: float) -> float:
    """Return a limit for this moment: a machine on which many processes want a core gives each of them less."""
    wanting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return limit_s * min(6.0, max(1.0, wanting / SHARE_S))


def ends(sidecar: Sidecar, *, within_s: float) -> int | None:
    """Return the exit code; ``None``: it still runs."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < patience(within_s):
        if (code := sidecar.process.poll()) is not None:
            return code
        time.sleep(0.05)
    return None
