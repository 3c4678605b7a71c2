"""How long an API server waits for the webhook when many pods are created at once: real process, real TLS.

Three kinds of arrival, 500 pods each:

- ``job``: as the Job controller creates them, 30 at once and then 20 a second (``--kube-api-burst``, ``--kube-api-qps``);
- ``batches``: as a controller without that limit does, 1, 2, 4, … at once, each batch after the one before;
- ``at-once``: all in one instant, as no controller does.

Connections stay open between requests, as the API server's do. Times are from the request to the whole answer, the connection's
TLS handshake included where one had to be opened. The client runs in this process and takes CPU of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.stores import free_port

HOST = "webhook.checkpoint-sidecar.svc"
_DEFAULTS = {
    "CKPT_INJECT_STORE": "s3:///runs/{namespace}/{name}",
    "CKPT_INJECT_SECRET": "data-connection",
    "CKPT_INJECT_IMAGE": "registry.example/checkpoint-sidecar:1",
    "CKPT_INJECT_INSTALL_HOOK": "true",
    "CKPT_INJECT_METRICS_PORT": "9471",
}
_BURST, _PER_S = 30, 20.0
Ask = Callable[[bytes], Coroutine[Any, Any, float]]


@dataclass(frozen=True)
class Measured:
    """Times of one kind of arrival. ``cpu_ms``: CPU time of the server per review."""

    p50_ms: float
    p99_ms: float
    most_ms: float
    cpu_ms: float
    connections: int


def review(index: int, *, variables: int) -> bytes:
    """Return the AdmissionReview of a pod of an indexed Job whose trainer has some environment variables."""
    labels = {"checkpoint-sidecar/inject": "true", "batch.kubernetes.io/job-name": "llama"}
    env: list[dict[str, Any]] = [{"name": f"SETTING_{number}", "value": "x" * 20} for number in range(variables)]
    env.append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    container: dict[str, Any] = {
        "name": "trainer",
        "image": "registry.example/trainer:1",
        "command": ["torchrun", "train.py"],
        "env": env,
    }
    container["resources"] = {"limits": {"nvidia.com/gpu": 8, "cpu": "32", "memory": "512Gi"}}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "llama", "uid": "u", "controller": True}
    found = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"llama-{index}-", "labels": labels, "ownerReferences": [owner]},
        "spec": {"restartPolicy": "Never", "containers": [container], "tolerations": [{"operator": "Exists"}]},
    }
    request = {
        "uid": f"review-{index}",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": "research",
        "operation": "CREATE",
        "object": found,
    }
    return json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}).encode()


class Connections:
    """Open connections to the server, the one that was used last first."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=str(certificate))
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.opened = 0

    async def ask(self, body: bytes) -> float:
        """Send a review and return the seconds until its answer, which must inject."""
        began_s = time.monotonic()
        reader, writer = self._idle.pop() if self._idle else await self._open()
        head = f"POST /mutate HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            status = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the server closed the idle connection: asked again, as Go's client does
            reader, writer = await self._open()
            writer.write(head.encode() + body)
            status = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(": ", 1) for line in status.decode().split("\r\n")[1:] if ": " in line)
        answer = await reader.readexactly(int(fields["content-length"]))
        took_s = time.monotonic() - began_s
        self._idle.append((reader, writer))
        if not status.startswith(b"HTTP/1.1 200") or b'"patch"' not in answer:
            raise RuntimeError(f"no sidecar was injected: {status[:40]!r} {answer[:200]!r}")
        return took_s

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.opened += 1
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context, server_hostname=HOST)

    async def close(self) -> None:
        """Close all."""
        for _, writer in self._idle:
            writer.close()
        await asyncio.sleep(0.2)
        self._idle.clear()


async def _as_a_job(ask: Ask, bodies: list[bytes]) -> list[float]:
    tasks = [asyncio.create_task(ask(body)) for body in bodies[:_BURST]]
    began_s = time.monotonic()
    for number, body in enumerate(bodies[_BURST:], 1):
        await asyncio.sleep(max(0.0, began_s + number / _PER_S - time.monotonic()))
        tasks.append(asyncio.create_task(ask(body)))
    return list(await asyncio.gather(*tasks))


async def _in_batches(ask: Ask, bodies: list[bytes]) -> list[float]:
    took: list[float] = []
    size = 1
    while len(took) < len(bodies):
        took += await asyncio.gather(*map(ask, bodies[len(took) : len(took) + size]))
        size *= 2
    return took


async def _at_once(ask: Ask, bodies: list[bytes]) -> list[float]:
    return list(await asyncio.gather(*map(ask, bodies)))


ARRIVALS = {"job": _as_a_job, "batches": _in_batches, "at-once": _at_once}


def _certificate(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    command += ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(name: str, pid: int, port: int, certificate: Path, bodies: list[bytes]) -> Measured:
    """Return the times of one kind of arrival; a few reviews before it warm up the server and are not counted."""
    connections = Connections(port, certificate)
    for body in bodies[:3]:
        await connections.ask(body)
    before_s = _cpu_s(pid)
    took_ms = sorted(took_s * 1e3 for took_s in await ARRIVALS[name](connections.ask, bodies))
    cpu_ms = (_cpu_s(pid) - before_s) / len(bodies) * 1e3
    await connections.close()
    quantiles = statistics.quantiles(took_ms, n=100)
    return Measured(quantiles[49], quantiles[98], took_ms[-1], cpu_ms, connections.opened)


def main() -> None:
    """Print a line for each kind of arrival."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.webhook", description=__doc__.splitlines()[0])
    parser.add_argument("--arrival", default="job,batches,at-once", help="of job, batches, at-once")
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--variables", type=int, default=20, help="environment variables of the trainer")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    bodies = [review(index, variables=given.variables) for index in range(given.pods)]
    port = free_port()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _certificate(folder)
        command = [sys.executable, "-m", "sidecar", "webhook", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key")]
        server = subprocess.Popen(command, env={**os.environ, **_DEFAULTS}, stdout=subprocess.DEVNULL)
        try:
            found = asyncio.run(_all(given.arrival.split(","), server, port, folder / "tls.crt", bodies))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    if given.json:
        print(json.dumps({name: asdict(measured) for name, measured in found.items()}))
        return
    print(f"{given.pods} pods, reviews of {len(bodies[0]) / 1024:.1f} KiB")
    for name, measured in found.items():
        print(
            f"{name:8} p50 {measured.p50_ms:7.1f} ms  p99 {measured.p99_ms:7.1f} ms  max {measured.most_ms:7.1f} ms  "
            f"server's CPU {measured.cpu_ms:.2f} ms a review  {measured.connections} connections"
        )


async def _all(
    names: list[str], server: subprocess.Popen[bytes], port: int, certificate: Path, bodies: list[bytes]
) -> dict[str, Measured]:
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if server.poll() is not None:
                raise RuntimeError("the webhook did not start") from None
            await asyncio.sleep(0.1)
        else:
            writer.close()
            break
    return {name: await measure(name, server.pid, port, certificate, bodies) for name in names}


if __name__ == "__main__":
    main()
