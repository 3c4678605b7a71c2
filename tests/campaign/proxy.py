"""The way to the store, with troubles that come and go."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.faults.plan import Dice, Fault, Kind
from tests.faults.proxy import Cut, Dialect, FaultProxy
from tests.faults.wire import BUFFER_BYTES, Peer, Request

EVERY_REQUEST = 1 << 30
IN_REQUESTS: dict[str, tuple[Kind, ...]] = {
    "500": (Kind.ERROR_500,),
    "503": (Kind.SLOW_DOWN, Kind.SLOW_DOWN_EARLY),
    "429": (Kind.TOO_MANY,),
    "200 with an error": (Kind.ERROR_IN_200,),
    "404 of a load balancer": (Kind.BARE_404,),
    "502 of a load balancer": (Kind.BARE_502,),
    "reset": (Kind.RESET_BEFORE, Kind.RESET_UPLOAD, Kind.RESET_DOWNLOAD),
    "FIN in mid-body": (Kind.STALL_UPLOAD_CLOSE, Kind.TRUNCATED),
    "closed when kept": (Kind.CLOSED_AFTER,),
    "stalled": (Kind.STALL_UPLOAD, Kind.STALL_DOWNLOAD, Kind.LATENCY),
    "silent requests": (Kind.SILENT_REQUEST, Kind.SILENT_UPLOAD, Kind.SILENT_ANSWER, Kind.SILENT_DOWNLOAD),
    "answer lost": (Kind.LOST_ANSWER,),
    "bits flipped up": (Kind.CORRUPT_UPLOAD,),
    "bits flipped down": (Kind.CORRUPT_DOWNLOAD,),
}
IN_CONNECTIONS = ("refused", "silent", "silent connections", "slow", "tls handshake")
TROUBLES = (*IN_REQUESTS, *IN_CONNECTIONS)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of the way, from one moment of a life to another."""

    kind: str
    begin_s: float
    length_s: float
    share: float = 1.0
    """Of the requests, or of the connections."""
    seconds: float = 1.0
    """Of a stall."""

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s


class StoreProxy(FaultProxy):
    """Stands before an S3 server. ``troubles`` go by the time since ``began``."""

    def __init__(self, target: str, seed: int, *, tls: ssl.SSLContext | None = None, dialect: Dialect | None = None) -> None:
        super().__init__(target, self._decide, dialect=dialect)
        self.harmed: Counter[str] = Counter()
        self.cut_off = False
        """Nothing passes, and nobody is told: a node without its network."""
        self._tls, self._seed = tls, seed
        self._troubles: list[tuple[Trouble, Dice]] = []
        self._began_s = 0.0
        self._listening: socket.socket | None = None
        self._address: tuple[str, int] = ("127.0.0.1", 0)

    def begin(self, troubles: Sequence[Trouble]) -> None:
        """Let the troubles of a life begin, and end those before it."""
        self._troubles = [(trouble, self._dice(trouble, number)) for number, trouble in enumerate(troubles)]
        self._began_s = time.monotonic()

    def _dice(self, trouble: Trouble, number: int) -> Dice:
        kinds, seed = IN_REQUESTS.get(trouble.kind, ()), self._seed * 10 + number
        return Dice(seed, share=trouble.share, kinds=kinds, seconds=trouble.seconds, in_a_row=EVERY_REQUEST)

    def heal(self) -> None:
        """End all troubles; what is silent stays so."""
        self._troubles, self.cut_off = [], False

    def active(self) -> list[tuple[Trouble, Dice]]:
        now_s = time.monotonic() - self._began_s
        return [(trouble, dice) for trouble, dice in self._troubles if trouble.begin_s <= now_s < trouble.end_s]

    @contextlib.contextmanager
    def running(self, address: str = "127.0.0.1") -> Iterator[str]:
        self._address = (address, 0)
        self._listen()
        watching = threading.Thread(target=self._watch)
        watching.start()
        try:
            yield f"{'https' if self._tls else 'http'}://{address}:{self._address[1]}"
        finally:
            self._stopping.set()
            watching.join()
            self._refuse_connections()
            for peer in list(self._peers):
                peer.close()
            for thread in self._threads:
                thread.join()

    def _listen(self) -> None:
        server = socket.create_server(self._address, backlog=128)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._address, self._listening = server.getsockname(), server
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _refuse_connections(self) -> None:
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None

    def _watch(self) -> None:
        """Open and close the door, and set the pace."""
        while not self._stopping.wait(0.05):
            kinds = {trouble.kind for trouble, _ in self.active()}
            if "refused" in kinds and self._listening is not None:
                self.harmed["refused"] += 1
                self._refuse_connections()
                for peer in list(self._peers):
                    peer.close()
            elif "refused" not in kinds and self._listening is None:
                self._listen()
            self.bytes_per_s, self.latency_s = (400e3, 0.15) if "slow" in kinds else (None, 0.0)
            self.harmed["slow"] += "slow" in kinds

    def _serve(self, client: Peer, number: int) -> None:
        for trouble, _ in self.active():
            if trouble.kind in ("silent", "silent connections") and self._falls(number, trouble):
                kinds = (Kind.SILENT_CONNECTION, Kind.SILENT_WHEN_KEPT, Kind.SILENT_REQUEST, Kind.SILENT_ANSWER)
                self.silences[number] = kinds[0 if trouble.kind == "silent" else number % len(kinds)]
                self.harmed[trouble.kind] += 1
        super()._serve(client, number)

    def _falls(self, number: int, trouble: Trouble) -> bool:
        return trouble.kind == "silent" or number * 2654435761 % 1000 < trouble.share * 1000

    def _secured(self, client: Peer) -> Peer:
        if self._tls is None:
            return client
        if any(trouble.kind == "tls handshake" for trouble, _ in self.active()):
            self.harmed["tls handshake"] += 1
            raise Cut(Fault(Kind.RESET_BEFORE), reset=self.harmed["tls handshake"] % 3 == 0)
        secured = Peer(self._tls.wrap_socket(client._sock, server_side=True))
        self._peers.add(secured)
        return secured

    def _decide(self, request: Request) -> Fault | None:
        if self.cut_off:
            self.harmed["cut off"] += 1
            return Fault(Kind.SILENT_REQUEST)
        for trouble, dice in self.active():
            if (fault := dice(request)) is not None:
                self.harmed[trouble.kind] += 1
                closes = fault.kind in (Kind.STALL_UPLOAD_CLOSE, Kind.STALL_DOWNLOAD_CLOSE)
                return Fault(fault.kind, at=fault.at, seconds=0.0 if closes else fault.seconds)
        return None
