"""Takes the README's picture of the live page: a real sidecar, an S3 server in memory, a small real training.

``make screenshot``. It shows the page, and measures nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import servers
from tests.api.browser import Page, browser
from tests.process.sidecar_process import Sidecar, sidecar

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/page.png"
WIDTH_PX, HEIGHT_PX = 1100, 760
BUCKET = "models"
SAVES = 6
"""Number of checkpoints that are in the store then."""


def main() -> int:
    """Write the picture. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="screenshot-") as name, servers.moto() as endpoint:
        folder = Path(name)
        servers.create_bucket(endpoint, BUCKET)
        settings = {
            "CKPT_STORE": f"s3://{BUCKET}/llama-7b",
            "AWS_S3_ENDPOINT": endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_DEFAULT_REGION": servers.REGION,
            "CKPT_SAVE_STRATEGY": "steps",
            "CKPT_SAVE_STEPS": "40",
            "CKPT_GRACE_SECONDS": "60",
            "JOB_NAME": "llama-7b-sft",
            "POD_NAMESPACE": "team-a",
        }
        with sidecar(folder / "volume", settings) as running:
            running.ready()
            script = [str(ROOT / "examples/train_hf.py"), "--max-steps", "4000", "--output-dir", str(folder / "output")]
            command = [sys.executable, "-m", "trainer_hook", "run", "--", sys.executable, *script]
            with (folder / "trainer.log").open("wb") as log:
                trainer = subprocess.Popen(command, env=running.environ, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
            try:
                asyncio.run(_take(running))
            except AssertionError:
                sys.stderr.write((folder / "trainer.log").read_text()[-3000:] + running.log()[-3000:])
                raise
            finally:
                trainer.kill()
                trainer.wait()
    return 0


async def _take(running: Sidecar) -> None:
    async with browser() as tab:
        page: Page = await tab()
        await page.open(f"http://127.0.0.1:{running.port}/", width=WIDTH_PX, height=HEIGHT_PX)
        await page.call("Emulation.setScrollbarsHidden", hidden=True)
        await page.until(f"(document.getElementById('list')?.children.length ?? 0) >= {SAVES - 1}")
        await asyncio.to_thread(running.command, "save")
        await page.until(f"(document.getElementById('list')?.children.length ?? 0) >= {SAVES}")
        await page.shows("headline", "Training is safe")
        await page.until(
            "[...document.querySelectorAll('#list .state')].every((state) => state.innerText.startsWith('durable'))"
        )
        await page.screenshot(PICTURE, whole=False)
        await page.close()


if __name__ == "__main__":
    sys.exit(main())
