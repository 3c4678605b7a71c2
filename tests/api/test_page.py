"""The live page in a real browser, beside a real sidecar and a training that is files."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.api.guard import MOST_UNDER_WAY
from sidecar.core.format.readable import seconds_text, size_text
from tests.api.browser import Page, browser, executable
from tests.api.test_live import Viewer
from tests.api.training import Training, training
from tests.process.sidecar_process import Sidecar, sidecar

HOSTILE = "<img src=x onerror=document.title='owned'>"


@asynccontextmanager
async def watched(
    tmp_path: Path, settings: Mapping[str, str] = {}, **window: Any
) -> AsyncIterator[tuple[Page, Sidecar, Training]]:
    """Run a sidecar, a training and a page that shows them."""
    executable()
    store = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", {**store, **settings}) as running:
        await asyncio.to_thread(running.ready)
        with training(running.volume) as trainer:
            trainer.at(10)
            async with browser() as tab:
                page = await tab()
                await page.open(f"http://127.0.0.1:{running.port}/", **window)
                await page.until("document.body.dataset.connection === 'live'")
                yield page, running, trainer
                await page.close()


async def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true value of a condition, without holding the loop."""
    for _ in range(600):
        if value := await asyncio.to_thread(condition):
            return value
        await asyncio.sleep(0.1)
    raise AssertionError("did not come true")


async def test_the_page_says_whether_training_is_safe_and_follows_it(tmp_path: Path) -> None:
    async with watched(tmp_path) as (page, running, trainer):
        await page.shows("headline", "no checkpoint was finished yet")
        trainer.save(10)
        trainer.at(14)
        await page.shows("durable", "Step 10")
        await page.shows("headline", "Training is safe")
        await page.shows("timeline-count", "1 in the store")
        assert await page.text("sigterm") == "nothing"
        assert "grace" in await page.text("sigterm-more")
        await page.shows("kill", "4 steps")
        await page.shows("step", "Step 14")
        assert (await page.text("step-total")).startswith("of 1,000")
        assert await page.text("loss") == "1.23"
        assert "durable after" in await page.text("list")
        assert "Safe · step 10 durable" in await page.evaluate("document.title")
        assert page.faults == []
        assert {url.split("/")[2] for url in page.requests} == {f"127.0.0.1:{running.port}"}, "nothing from elsewhere"


async def test_it_says_amounts_times_and_ages_as_the_commands_do(tmp_path: Path) -> None:
    sizes, times, ages = (0, 999, 123_456_789, 10**18), (0.042, 4.24, 67.4, 250.0, 7500.0, 273_600.0), (67.9, 95, 119, 215)
    async with watched(tmp_path) as (page, _, _):
        said = await page.evaluate(
            "import('/page/format.js').then((f) => "
            f"[{[*sizes]}.map(f.bytes), {[*times]}.map(f.duration), {[*ages]}.map(f.ago), f.rate(2e8)])"
        )
    assert said[:2] == [[*map(size_text, sizes)], [*map(seconds_text, times)]]
    assert said[2:] == [["67 s ago", "95 s ago", "119 s ago", "3 min ago"], "200 MB/s"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
async def test_it_fits_the_window_and_every_control_has_a_name(width: int, tmp_path: Path) -> None:
    async with watched(tmp_path, width=width, height=740) as (page, _, trainer):
        trainer.save(10)
        await page.shows("headline", "Training is safe")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert await page.evaluate("document.querySelectorAll('dl > :not(div), dl > div > :not(dt, dd)').length") == 0
        for scheme in ("light", "dark"):
            await page.look(scheme)
            assert await page.evaluate(_FAINT) == [], scheme
        tree = [node for node in (await page.call("Accessibility.getFullAXTree"))["nodes"] if not node.get("ignored")]
        named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if "role" in node}
        for role in ("button", "textbox", "link", "progressbar", "meter", "region", "heading"):
            assert all(name for kind, name in named if kind == role), role
        assert {("button", "Save now"), ("textbox", "Upload limit"), ("heading", "Checkpoints")} <= named
        headline = await page.text("headline")
        assert ("heading", headline) in named


@pytest.mark.slow
async def test_the_keyboard_reaches_every_control_in_the_order_of_the_page(tmp_path: Path) -> None:
    async with watched(tmp_path) as (page, _, trainer):
        trainer.save(10)
        await page.until("!document.getElementById('save').disabled")
        reached = []
        for _ in range(8):
            await page.press("Tab")
            reached.append(await page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert reached[:7] == ["skip", "save", "stop", "flush", "limit", "limit-set", "limit-none"]
        await page.evaluate("document.getElementById('stop').focus()")
        await page.press("Enter")
        assert await page.evaluate("document.getElementById('stop-dialog').open && document.activeElement.id") == "stop-no"
        await page.press("Escape")
        assert await page.evaluate("document.activeElement.id") == "stop"
        assert trainer.request() is None, "nothing was asked for"


@pytest.mark.slow
async def test_the_buttons_save_wait_and_limit(tmp_path: Path) -> None:
    async with watched(tmp_path) as (page, running, trainer):
        await page.until("!document.getElementById('save').disabled")
        await page.evaluate("document.getElementById('save').click()")
        asked = await eventually(trainer.request)
        assert asked["action"] == "save"
        trainer.answer(12)
        await page.shows("outcome", "checkpoint-12 is durable.")
        await page.evaluate("document.getElementById('flush').click()")
        await page.shows("outcome", "Everything that the trainer finished is durable.")
        await page.evaluate("document.getElementById('limit').focus()")
        await page.write("5MB/s")
        await page.press("Enter")
        await page.shows("outcome", "limited to 5 MB/s")
        await page.shows("limit-now", "5 MB/s now")
        assert running.status()["bandwidth_limit_bytes_per_s"] == 5_000_000
        await page.evaluate("document.getElementById('limit').focus()")
        await page.write("fast")
        await page.press("Enter")
        await page.shows("outcome", "body.limit")
        await page.evaluate("document.getElementById('limit-none').click()")
        await page.shows("outcome", "no limit")
        await page.evaluate("document.getElementById('stop').click()")
        await page.evaluate("document.getElementById('stop-yes').click()")
        await eventually(lambda: (trainer.request() or {})["action"] == "save-and-stop")
        assert [fault for fault in page.faults if "422" not in fault] == []


@pytest.mark.slow
async def test_where_a_token_is_required_the_page_asks_for_it_and_keeps_it_to_itself(tmp_path: Path) -> None:
    async with watched(tmp_path, {"CKPT_API_TOKEN": "required"}) as (page, running, trainer):
        await page.until("!document.getElementById('save').disabled")
        for token, outcome in (("wrong", None), ((running.volume / ".ckpt/token").read_text(), "Asked")):
            if outcome is None:
                await page.evaluate("document.getElementById('save').click()")
            await page.until("document.getElementById('token-dialog').open")
            await page.write(token)
            await page.press("Enter")
        await page.shows("outcome", "Asked")
        assert (await eventually(trainer.request))["action"] == "save"
        kept = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
        assert token not in kept
        assert token not in await page.evaluate("document.documentElement.outerHTML")


@pytest.mark.slow
async def test_a_page_that_hears_nothing_says_so_and_comes_back_by_itself(tmp_path: Path) -> None:
    async with watched(tmp_path) as (page, running, trainer):
        trainer.save(10)
        await page.shows("durable", "Step 10")
        running.kill()
        await page.shows("stale", "The sidecar does not answer; trying again. This is what it said at")
        assert await page.evaluate("['save', 'stop', 'flush'].every((id) => document.getElementById(id).disabled)")
        assert await page.text("durable") == "Step 10", "what was known stays"
        running.process = running._start(())
        await page.until("document.body.dataset.connection === 'live'")
        assert not await page.text("stale")


@pytest.mark.slow
async def test_the_countdown_of_an_ending_pod_and_its_end(tmp_path: Path) -> None:
    settings = {"CKPT_GRACE_SECONDS": "60", "CKPT_BANDWIDTH_LIMIT": "1MB/s"}
    async with watched(tmp_path, settings) as (page, running, trainer):
        trainer.save(10, 40 << 20)  # for 40 s: a busy machine needs time for the page
        await page.shows("list", "uploading")
        running.process.terminate()
        await page.shows("countdown-more", "left of 60 s")
        await page.shows("plan", "checkpoint-10")
        running.process.terminate()
        await page.shows("stale", "The sidecar has ended")


@pytest.mark.slow
async def test_names_and_reasons_of_others_are_text(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with watched(tmp_path, {"JOB_NAME": "x", "POD_NAMESPACE": "y"}) as (page, running, _):
        marker = {"step": 20, "files": [{"path": HOSTILE, "size_bytes": 3}]}
        bad = running.volume / "checkpoint-20"
        bad.mkdir()
        (bad / HOSTILE).write_bytes(b"four")
        (bad / ".complete").write_text(json.dumps(marker))
        shown = await page.shows("list", "onerror")
        assert HOSTILE in shown
        assert await page.evaluate("document.images.length") == 1
        assert "owned" not in await page.evaluate("document.title")
        # Even if a script tried: the policy of the page refuses to make elements of text.
        insert = "document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); return 'done'"
        refused = await page.evaluate(f"(() => {{ try {{ {insert} }} catch (error) {{ return error.name }} }})()")
        assert refused == "TypeError"
        assert folder.exists()


@pytest.mark.slow
async def test_a_viewer_costs_little_of_a_core(tmp_path: Path) -> None:
    async with watched(tmp_path) as (page, running, _):
        before_s = _cpu_s(running.process.pid)
        await asyncio.sleep(5.0)
        used_s = _cpu_s(running.process.pid) - before_s
        assert used_s < 0.1 * 5.0, "of a core, with a viewer"
        assert await page.evaluate("document.body.dataset.connection") == "live"


@pytest.mark.slow
async def test_a_tab_in_the_background_lets_go_of_its_stream_and_takes_it_up_again(tmp_path: Path) -> None:
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    async with watched(tmp_path) as (page, running, trainer):
        others = [Viewer(running.port) for _ in range(MOST_UNDER_WAY["viewer"] - 1)]
        refused = Viewer(running.port)
        await page.evaluate(hide.format("true"))
        await eventually(lambda: _is_served(running.port))
        for viewer in (*others, refused):
            viewer.close()
        await page.evaluate(hide.format("false"))
        trainer.at(77)
        await page.shows("step", "Step 77")
        assert {viewer.answer.status for viewer in others} == {200}
        assert refused.answer.status == 503, "the page had its place"


def _is_served(port: int) -> bool:
    viewer = Viewer(port)
    viewer.close()
    return viewer.answer.status == 200


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_FAINT = """
(() => {
  const rgb = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(":disabled, noscript, .skip")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) faint.push(`${node.textContent.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return faint;
})()
"""


STATES = [
    "writing",
    "rejected",
    "finished",
    "uploading",
    "paused",
    "uploaded",
    "committed",
    "superseded",
    "lost",
    "given-up",
    "bad",
]
REASONS = ["periodic", "jit", "manual", "final", None, HOSTILE]
AT = "2026-01-01T00:00:00.000Z"


def overview_of(known: dict[str, Any], number: int) -> dict[str, Any]:
    """Return an overview with every state, every other of its values unknown, and hostile text where text is foreign."""
    odd = number % 2 == 1
    checkpoints = [
        {
            "name": f"checkpoint-{step}" if step else "final",
            "step": step or None,
            "state": state,
            "reason": HOSTILE if odd else None,
            "save_reason": REASONS[(step + number) % len(REASONS)],
            "created_at": None if odd and step % 3 == 0 else AT,
            "committed_at": AT if step % 2 else None,
            "size_bytes": None if odd else 100,
            "sent_bytes": None if odd else 40,
            "node_count": None if odd else 2,
            "on_volume": odd,
            "in_store": step % 2 == 0,
        }
        for step, state in enumerate(STATES)
    ]
    resumes = ["choosing", "downloading", "ready", "none", "failed"]
    resume = {
        "state": resumes[number % len(resumes)],
        "checkpoint": HOSTILE,
        "source": ["local", "store", None][number % 3],
        "done_bytes": 3,
        "total_bytes": 0 if odd else 10,
        "passed_over": [{"checkpoint": HOSTILE, "reason": HOSTILE, "may_be_whole": odd}],
        "detail": HOSTILE if odd else None,
    }
    planned = [
        {"checkpoint": HOSTILE, "verdict": verdict, "left_bytes": 5, "predicted_s": None if odd else 3.0, "reason": None}
        for verdict in ("fits", "may-fit", "no-time")
    ]
    risk = dict.fromkeys(known["at_risk"], None if odd else 7.0) | {"grows": odd, "advice": HOSTILE, "fits_grace": not odd}
    return known | {
        "checkpoints": checkpoints,
        "resume": None if number == 9 else resume,
        "flush": planned,
        "termination": {"source": HOSTILE, "at": AT, "grace_seconds": 30.0, "deadline_in_s": -1.0 if odd else 9.0},
        "at_risk": risk,
        "volume": {"free_bytes": None, "total_bytes": None} if odd else {"free_bytes": 1, "total_bytes": 2},
        "trainer": {"alive": odd, "ranks": 0, "state": None, "step": None, "updated_at": None, "world_size": None}
        | {"total_steps": None if odd else 0, "loss": None if odd else 1e-9},
        "degraded_reason": HOSTILE if odd else None,
        "job": None if odd else HOSTILE,
        "durable": None
        if odd
        else {"name": "final", "step": None, "created_at": None, "committed_at": None, "by_this_pod": odd},
        "earlier": {"state": ["failed", "reading", "read", "unread"][number % 4], "folders": 5000, "detail": HOSTILE},
    }


@pytest.mark.slow
async def test_every_state_is_drawn_and_hostile_text_stays_text(tmp_path: Path) -> None:
    async with watched(tmp_path) as (page, running, _):
        known = await asyncio.to_thread(running.call, "GET", "/v1/overview")
        for number in range(10):
            drawn = await page.evaluate(
                f"""(async () => {{
                  const overview = {json.dumps(overview_of(known, number))};
                  const [sections, timeline] = [await import("/page/sections.js"), await import("/page/timeline.js")];
                  sections.draw(overview, Date.now());
                  sections.tick(overview, Date.now(), 2);
                  timeline.draw(overview, Date.now());
                  const odd = [...document.querySelectorAll("main *")].filter((node) => node.onerror || node.tagName === "IMG");
                  const text = document.body.innerText;
                  const durable = document.getElementById("durable").innerText;
                  const advises = !document.getElementById("advice").hidden;
                  const isOdd = /undefined|NaN|\\[object/.test(text);
                  return [sections.title(overview), odd.length, isOdd, document.images.length, advises, durable];
                }})()"""
            )
            trouble = number % 2 == 1  # of settings nothing is said once the pod is ending
            assert drawn[1:] == [0, False, 1, trouble, "not known yet" if trouble else "final"], drawn
        assert page.faults == []
