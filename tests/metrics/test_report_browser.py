"""report.html of a recorded run in a real browser: no errors, nothing covered, nothing cut off."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from timing import deadline

from rlcore.metrics.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RECORDED = Path(__file__).parent / "recorded_run"
STARTS_S, ANSWERS_S = deadline(60), deadline(60)
PHONE, DESK = (390, 844), (1400, 1000)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]

# What the page looks like, in numbers. A legend must lie below its plot, and within its card.
LOOK = """(() => {
  const box = (e) => e.getBoundingClientRect();
  const charts = [...document.querySelectorAll('.chart')]
    .filter((c) => !c.closest('details:not([open])'));
  return JSON.stringify({
    ready: document.documentElement.dataset.ready,
    theme: document.documentElement.dataset.theme,
    page: getComputedStyle(document.body).backgroundColor,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    sections: [...document.querySelectorAll('h2')].map((h) => h.textContent),
    drawn: charts.filter((c) => c.querySelector('.plot svg.main-svg')).length,
    charts: charts.length,
    covered: charts.filter((c) => box(c.querySelector('.legend')).top
      < box(c.querySelector('.plot')).bottom - 1).length,
    outside: charts.filter((c) => box(c.querySelector('.legend')).right > box(c).right + 1).length,
    samples: document.querySelectorAll('.sample').length,
    coloured: [...document.querySelectorAll('.t')].filter((t) => t.style.background).length,
    counted: document.getElementById('count').textContent,
  });
})()"""


class Page:
    """One tab, over the DevTools protocol. Keeps what the console says."""

    def __init__(self, socket):
        self._socket = socket
        self._number = 0
        self.errors = []

    async def ask(self, method, **params):
        self._number += 1
        number = self._number
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads((await self._socket.receive(timeout=ANSWERS_S)).data)
            if said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(said["params"]["exceptionDetails"])
            if said.get("method") in ("Runtime.consoleAPICalled", "Log.entryAdded"):
                entry = said["params"].get("entry", said["params"])
                if "error" in (entry.get("type"), entry.get("level")):
                    self.errors.append(entry)
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    async def run(self, script):
        found = await self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, file, theme, size):
        width, height = size
        await self.ask("Runtime.enable")
        await self.ask("Log.enable")
        await self.ask("Page.enable")
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.ask("Page.navigate", url=f"file://{file}#theme={theme}")
        async with asyncio.timeout(ANSWERS_S):
            while await self.run("document.documentElement?.dataset.ready") != "yes":
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def browser():
    """The address of a headless browser that is alone in a folder of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *words,
            "--no-first-run",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(STARTS_S):
                while not port_file.exists() or len(port_file.read_text().split()) < 2:
                    assert process.returncode is None, "the browser ended"
                    await asyncio.sleep(0.1)
            yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        finally:
            process.kill()
            await process.wait()


async def visit(file, looks):
    """What each (theme, size) shows, then `script`s of the last one."""
    import aiohttp

    found = []
    async with browser() as address, aiohttp.ClientSession() as session:
        for theme, size in looks:
            async with session.put(f"{address}/json/new?about:blank") as answer:
                url = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                await page.open(file, theme, size)
                look = json.loads(await page.run(LOOK))
                await use(page)
                found.append((look, json.loads(await page.run(LOOK)), page.errors))
    return found


async def use(page):
    """Everything a reader can set, once."""
    # what is behind a fold is drawn when it says that it was opened, which it does later
    await page.run(
        "window.unsaid = new Set(document.querySelectorAll('details:not([open])'));"
        "for (const d of window.unsaid) {"
        "  d.addEventListener('toggle', () => window.unsaid.delete(d)); d.open = true; }"
    )
    async with asyncio.timeout(ANSWERS_S):
        while await page.run("window.unsaid.size"):
            await asyncio.sleep(0.1)
    await page.run(
        "const s = document.getElementById('smooth'); s.value = '0.95'; s.onchange();"
        "const a = document.getElementById('colour'); a.value = 'age'; a.oninput();"
        "const l = document.getElementById('least'); l.value = '1'; l.oninput();"
        "document.querySelector('.legend button').click();"
        "document.querySelector('.t').click();"
    )


def test_a_report_in_a_browser(tmp_path):
    file = write_report([RECORDED], tmp_path / "report.html", lambda folder, rows: [])
    assert file.stat().st_size < 6_000_000
    looks = [("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)]
    found = asyncio.run(visit(file, looks))
    for (theme, size), (look, used, errors) in zip(looks, found):
        assert errors == [], (theme, size)
        assert look["ready"] == "yes" and look["theme"] == theme
        questions = {"Does it learn?", "Is it fresh?", "Do actor and learner agree?"}
        assert questions | {"Where does the time go?", "Samples"} <= set(look["sections"])
        for state in (look, used):
            assert state["overflow"] <= 0, (theme, size)
            assert state["charts"] == state["drawn"] > 10
            assert state["covered"] == state["outside"] == 0
        assert used["charts"] > look["charts"]  # those that were folded away
        assert look["samples"] > 0 and look["coloured"] > 0
        assert used["counted"] != look["counted"]  # the filter by reward
    assert found[0][0]["page"] != found[1][0]["page"]
