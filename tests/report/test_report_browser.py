"""report.html of a recorded run in a real browser: no errors, nothing covered, nothing cut off."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from timing import deadline

from rlcore.metrics.health import RunVerdict
from rlcore.report.page import write_report
from rlcore.report.replay_page import write_replay

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RECORDED = Path(__file__).parents[1] / "metrics" / "recorded_run"
STARTS_S, ANSWERS_S = deadline(60), deadline(60)
PHONE, DESK = (390, 844), (1400, 1000)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]

LOOK = (Path(__file__).parent / "report_look.js").read_text()


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


WELL = RunVerdict("well", "Healthy: nothing to warn of.", kept=["samples spoke"])


async def visit(file, looks, look_at=LOOK, use=lambda page: use_report(page)):
    """What each (theme, size) shows, before and after it was used, and the errors."""
    import aiohttp

    found = []
    async with browser() as address, aiohttp.ClientSession() as session:
        for theme, size in looks:
            async with session.put(f"{address}/json/new?about:blank") as answer:
                url = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                await page.open(file, theme, size)
                look = json.loads(await page.run(look_at))
                await use(page)
                found.append((look, json.loads(await page.run(look_at)), page.errors))
    return found


async def use_report(page):
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
        "const s = document.getElementById('smooth'); s.value = '0.9'; s.oninput();"
        "const a = document.getElementById('colour'); a.value = 'age'; a.oninput();"
        "const v = document.getElementById('view'); v.value = 'single'; v.oninput();"
        "const l = document.getElementById('least'); l.value = '1'; l.oninput();"
        "document.querySelector('.legend button').click();"
        "document.querySelector('.t').click();"
        "const c = document.querySelector('.chart:not(.wide) .plot');"
        "const clientX = c.getBoundingClientRect().right - 12;"
        "c.dispatchEvent(new PointerEvent('pointermove', {clientX, clientY: 99}));"
    )


LOOKS = [("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)]


def make_fleet(folder):
    """A run with two kinds of actors, a whole group of each step, and two evaluations."""
    shutil.copytree(RECORDED, folder)
    for file in (folder / "samples").iterdir():
        file.unlink()
    recorded = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text().splitlines()]
    rows = [dict(recorded[i % len(recorded)], step=i + 1, policy_version=i + 1) for i in range(60)]
    for row in rows:
        for kind, factor in (("bf16", 0.9), ("fp8", 1.1)):
            row |= {f"{name}@{kind}": row[name] * factor for name in KINDS}
    write_lines(folder / "metrics.jsonl", rows)
    for version in (0, 60):
        answers = ["8" if version and i % 3 == 0 else f"{i} is wrong" for i in range(9)]
        lines = [
            {"prompt_id": f"digits/heldout/{i}", "response": said, "reward": float(said == "8")}
            for i, said in enumerate(answers)
        ]
        write_lines(folder / "samples" / f"eval_{version:06d}_digits_greedy.jsonl", lines)
    for step in (59, 60):
        drawn = {
            **{"prompt_id": "digits/train/1", "group_id": step, "prompt": "1 + 1 = "},
            **{"response": "2 or 3", "pieces": [["2", " or", " 3"]], "tokens": 3},
            **{"token_versions": [[step - 2, 3]], "learner_version": step, "actor": "bf16-0"},
            **{"log_ratio": [0.1, -0.4, None], "score_status": "ok"},
        }
        judged = [{"sample": i, "reward": i / 3, "advantage": i - 1.5} for i in range(4)]
        write_lines(folder / "samples" / f"step_{step:06d}.jsonl", [drawn | own for own in judged])
    return folder


KINDS = ("reward/mean", "mismatch/kl_k3", "mismatch/ess", "staleness/mean")


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", ("turns", "fleet"))
def test_a_report_in_a_browser(tmp_path, name):
    """Of a run with several turns, and of one with two kinds of actors, groups and evaluations."""
    run = make_fleet(tmp_path / name) if name == "fleet" else RECORDED
    file = write_report([run], tmp_path / "report.html", lambda folder, rows: WELL)
    assert file.stat().st_size < 5_000_000
    found = asyncio.run(visit(file, LOOKS))
    for (theme, size), (look, used, errors) in zip(LOOKS, found):
        assert errors == [], (theme, size)
        assert look["ready"] == "yes" and look["theme"] == theme
        questions = {"Does it learn?", "Is it fresh?", "Do actor and learner agree?"}
        assert questions | {"Where does the time go?", "Samples"} <= set(look["sections"])
        for state in (look, used):
            assert state["overflow"] <= 0 and state["sticking"] == [], (theme, size)
            assert state["charts"] == state["drawn"] > 10
            assert state["covered"] == state["outside"] == state["unsaid"] == 0
            assert state["red"] == state["alike"] == 0
        assert used["charts"] > look["charts"]  # those that were folded away
        assert look["samples"] > 0 and look["coloured"] > 0
        assert used["counted"] != look["counted"]  # the filter by reward
        # the newest evaluation, under the pointer, with the whole name of each curve
        assert "step" in used["tip"] and "eval/" in used["tip"]
    assert found[0][0]["page"] != found[1][0]["page"]
    if name == "fleet":
        look = found[0][0]
        assert look["raw"] > 0  # smoothed as the page opens
        assert look["advantages"] > 1
        order = ["turned right", "turned wrong", "other answer", "same"]
        assert look["pairs"] and look["pairs"] == sorted(look["pairs"], key=order.index)
        assert look["pairs"][0] != "same"


REPLAYED = """(() => {
  const tokens = [...document.querySelectorAll('.sample .t')];
  return JSON.stringify({
    ready: document.documentElement.dataset.ready,
    theme: document.documentElement.dataset.theme,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    verdict: document.querySelector('.verdict').textContent,
    facts: document.querySelector('dl').textContent,
    tokens: tokens.map((t) => t.textContent),
    shades: tokens.map((t) => getComputedStyle(t).backgroundColor),
    texts: [...document.querySelectorAll('.sample .text')].map((t) => t.textContent),
    cells: [...document.querySelectorAll('#step td')].map((c) => c.textContent),
  });
})()"""


def replayed_token(place, slope, share, text="<b>"):
    values = {"slope": slope, "weight": 1.0, "kept": 1.0, "advantage": 0.5, "share": share}
    where = {"group_id": 4, "sample": 2, "token": place}
    return values | where | {"text": text, "before": "1 < 2 ", "after": " 3" * 200}


async def turn_theme(page):
    await page.run("document.getElementById('theme').click()")


def test_the_page_of_a_replayed_step_in_a_browser(tmp_path):
    tokens = [replayed_token(0, -0.5, 0.6), replayed_token(7, 0.1, 0.2, "</script>")]
    figures = {"grad_norm": {"run": 0.25, "again": 0.25, "changed": 0.125}}
    figures["loss/policy"] = {"run": None, "again": -1.0}
    gradient = {"cosine": 0.75, "norm": 0.125, "executed_norm": 0.25}
    other = {"cosine": 0.9, "gradient": gradient, "settings": ["correction.mis.low=0.9"]}
    found = {"figures": figures, "differing": [], "tokens": tokens} | other
    file = write_replay(tmp_path / "replay_7.html", "a run", 7, found)
    assert file.stat().st_size < 100_000  # it has no charts
    looks = [("light", DESK), ("dark", PHONE)]
    for (theme, size), (look, used, errors) in zip(
        looks, asyncio.run(visit(file, looks, REPLAYED, turn_theme))
    ):
        assert errors == [] and look["ready"] == "yes", (theme, size)
        assert look["theme"] == theme != used["theme"]
        assert look["overflow"] <= 0, (theme, size)
        assert look["verdict"].startswith("All 1 figures are equal")
        assert "correction.mis.low=0.9" in look["facts"] and "0.75" in look["facts"]
        assert look["tokens"] == ["<b>", "</script>"]
        assert look["texts"][0].startswith("1 < 2 <b> 3")
        (one, other) = look["shades"]
        assert one != other and "0.75" in one
        cells = ["grad_norm", "0.25", "0.25", "0.125", "loss/policy", "-", "-1", "-"]
        assert look["cells"] == cells
