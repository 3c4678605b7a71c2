"""A real Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60.0
PATIENCE_S = 60.0


def executable() -> str:
    """Return the browser's path, or skip the test; with CKPT_TEST_BROWSER=required it fails."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        why = "no Chromium is installed: Debian package chromium"
        if os.environ.get("CKPT_TEST_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    return found


class Page:
    """One tab. ``faults`` are the errors of its console: exceptions, refused scripts and styles."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        self.faults: list[str] = []
        self.requests: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.faults.append(event["params"]["exceptionDetails"]["exception"].get("description", "exception"))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.faults.append(event["params"]["entry"]["text"] + " " + event["params"]["entry"].get("url", ""))
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one command of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], PATIENCE_S)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, also of a promise."""
        # Through the debugger: the page's own policy refuses eval().
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Go to an address with a size of the window and a colour scheme."""
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.look(scheme)
        await self.call("Page.navigate", url=url)

    async def look(self, scheme: str) -> None:
        """Set the colour scheme, light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def until(self, expression: str, *, is_met: Callable[[Any], bool] = bool) -> Any:
        """Return the first value of an expression that meets a condition."""
        deadline_s, value = asyncio.get_running_loop().time() + PATIENCE_S, None
        while asyncio.get_running_loop().time() < deadline_s:
            value = await self.evaluate(f"document.readyState === 'complete' ? ({expression}) : null")
            if is_met(value):
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"{expression} stayed {value!r}; faults: {self.faults}")

    async def text(self, identifier: str) -> str:
        """Return the text of an element."""
        found: str = await self.evaluate(f"document.getElementById({identifier!r}).innerText")
        return found

    async def shows(self, identifier: str, words: str) -> str:
        """Wait until an element shows some words, and return its text."""
        expression = f"document.getElementById({identifier!r}).innerText"
        found: str = await self.until(expression, is_met=lambda text: words in (text or ""))
        return found

    async def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        more: dict[str, Any] = {"windowsVirtualKeyCode": codes[key]} | ({"text": "\r"} if key == "Enter" else {})
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    async def write(self, words: str) -> None:
        """Write into the element that has the focus."""
        await self.call("Input.insertText", text=words)

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        taken = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@asynccontextmanager
async def browser() -> AsyncIterator[Callable[[], Any]]:
    """Run a browser for the length of the context, and give a function that opens a tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            executable(),
            "--headless=new",
            "--no-sandbox",  # in a container there are no user namespaces
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        environ = os.environ | {"HOME": profile}
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as client:
                yield lambda: _tab(client, port)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _port(written: Path, process: subprocess.Popen[bytes]) -> int:
    deadline_s = asyncio.get_running_loop().time() + START_S
    while asyncio.get_running_loop().time() < deadline_s:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        if written.exists() and (lines := written.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise AssertionError("the browser did not start")


async def _tab(client: aiohttp.ClientSession, port: int) -> Page:
    async with client.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
        address = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
    return Page(await client.ws_connect(address, max_msg_size=0))
