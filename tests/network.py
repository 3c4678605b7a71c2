"""Network namespaces: each pod has its own, with a cable to the other pods and one to the store, which can be pulled."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

SWITCH = "switch"
"""The namespace of both bridges: a firewall of this machine, such as Docker's, has no say there."""


def why_not() -> str | None:
    """Return why there can be no namespaces here, or ``None``."""
    if shutil.which("ip") is None:
        return "ip is not installed: apt-get install iproute2"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces need root: ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def is_required() -> bool:
    return bool(os.environ.get("CI")) or os.environ.get("CKPT_TEST_NETNS") == "required"


@dataclass(frozen=True)
class Host:
    """What a pod runs in."""

    namespace: str
    address: str
    """Where the other pods find it."""
    _network: Network
    _store_port: str

    @property
    def within(self) -> list[str]:
        """What goes before a command."""
        return ["ip", "netns", "exec", self.namespace]

    def pull_store_cable(self) -> None:
        """From now on nothing that it sends to the store arrives, and nothing that the store answers."""
        self._network.ip(f"-n {self._network.name(SWITCH)} link set {self._store_port} down")


class Network:
    """Two networks: one of the pods, one of the pods and this machine, where the store is."""

    def __init__(self) -> None:
        self._own = f"ckpt{os.getpid()}"
        self._subnet = f"10.{random.randrange(190, 240)}.{random.randrange(0, 250)}"  # 10.244: pods of tests/cluster
        self._hosts = 0
        self.store_address = f"{self._subnet}.1"
        """Where pods find this machine."""

    def name(self, part: str) -> str:
        return f"{self._own}-{part}"

    def ip(self, arguments: str) -> None:
        subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)

    @contextlib.contextmanager
    def up(self) -> Iterator[Network]:
        switch, cable = self.name(SWITCH), f"{self._own}s"
        try:
            self.ip(f"netns add {switch}")
            for bridge in ("pods", "store"):
                self.ip(f"-n {switch} link add {bridge} type bridge")
                self.ip(f"-n {switch} link set {bridge} up")
            self.ip(f"link add {cable} type veth peer name machine netns {switch}")
            self.ip(f"addr add {self.store_address}/25 dev {cable}")
            self.ip(f"link set {cable} up")
            self.ip(f"-n {switch} link set machine master store up")
            yield self
        finally:
            subprocess.run(["ip", "link", "del", cable], check=False, capture_output=True)
            # The other cables go with the namespaces that they end in, once nothing runs there any more.
            for part in (SWITCH, *(str(number) for number in range(self._hosts))):
                subprocess.run(["ip", "netns", "del", self.name(part)], check=False, capture_output=True)

    def host(self) -> Host:
        """Return a new namespace."""
        number, self._hosts = self._hosts, self._hosts + 1
        name, switch = self.name(str(number)), self.name(SWITCH)
        self.ip(f"netns add {name}")
        self.ip(f"-n {name} link set lo up")
        for device, bridge, address in (("eth0", "pods", 130 + number), ("store0", "store", 2 + number)):
            port = f"{bridge}{number}"
            self.ip(f"-n {switch} link add {port} type veth peer name {device} netns {name}")
            self.ip(f"-n {switch} link set {port} master {bridge} up")
            self.ip(f"-n {name} addr add {self._subnet}.{address}/25 dev {device}")
            self.ip(f"-n {name} link set {device} up")
        return Host(name, f"{self._subnet}.{130 + number}", self, f"store{number}")
