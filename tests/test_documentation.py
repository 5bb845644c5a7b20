"""The pages of docs/: links and anchors hold, none is missing.

That generated parts are current, and the navigation whole, is tested in test_architecture.py."""

import json
import re
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from benchmarks.evidence.evidence_studies import STUDIES
from rlcore.config.groups import groups
from rlcore.corrections.specs import CORRECTIONS
from rlcore.metrics.names import METRICS
from rlcore.objectives.specs import ADVANTAGES, LOSSES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINKING = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *PAGES,
    *ROOT.glob("benchmarks/**/*.md"),
]
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(path):
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def links(path):
    return [link for link in LINK.findall(prose(path)) if not re.match(r"\w+:", link)]


@cache
def anchors(path):
    """Of a page's headings, as the web views of Git hosts and docs/hooks.py make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        names = (f"{slug}-{n}" if n else slug for n in count())
        found.add(next(name for name in names if name not in found))
    return found


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_check_of_links_sees_them():
    assert sum(len(links(page)) for page in LINKING) > 200
    assert "which-one" in anchors(DOCS / "corrections" / "index.md")
    assert "adding-a-correction" in anchors(DOCS / "CONTRIBUTING.md")


def test_the_readme_and_the_first_page_link_to_every_page():
    first = (ROOT / "README.md", DOCS / "index.md")
    linked = {(p.parent / link.partition("#")[0]).resolve() for p in first for link in links(p)}
    own_page = {DOCS / "corrections" / f"{name}.md" for name in CORRECTIONS}
    assert set(PAGES) - own_page - linked == set()


def test_every_correction_has_a_page_and_shows_its_studies():
    pages = {p.stem: p for p in (DOCS / "corrections").glob("*.md")}
    overview = pages.pop("index")
    assert set(pages) == set(CORRECTIONS)
    for name, page in pages.items():
        shown = re.findall(r"/results/evidence/([a-z]+)\w*\.svg\)", page.read_text())
        assert bool(shown) == bool(studies_of(name)) and set(shown) <= studies_of(name)
        assert f"]({name}.md)" in overview.read_text()


def studies_of(correction):
    """The studies of evidence that have an arm with this correction."""
    return {
        name
        for name, study in STUDIES.items()
        for arms in (study.arms, *study.further.values())
        for words in arms.values()
        if any(re.match(rf"correction=.*\b{correction}\b", word) for word in words)
    }


def test_every_loss_advantage_and_algorithm_is_described():
    text = (DOCS / "losses.md").read_text()
    for name in LOSSES:
        found = re.findall(rf"^## .*`algorithm\.loss={name}`\n(.*?)^## ", text, re.M | re.S)
        assert len(found) == 1, f"docs/losses.md has no section of {name}"
        for part in ("**When**", "**Watch**", "**Does not help**", "**Source**"):
            assert part in found[0], name
    for name in (*ADVANTAGES, *groups()["algorithm"]):
        assert f"`{name}`" in text, name


def test_one_page_says_what_was_run_where():
    """Of what was not run anywhere, the others say nothing: they would contradict it some day."""
    claim = re.compile(r"unproven(?!_)|tried on:|not yet run|(?:has|have) not run", re.IGNORECASE)
    found = {p.name: claim.findall(prose(p)) for p in PAGES if p.name != "status.md"}
    assert {name: said for name, said in found.items() if said} == {}


def test_a_picture_is_stale_when_its_sources_have_changed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(DOCS)
    import screenshots

    assert {*screenshots.SOURCES} == {*json.loads(screenshots.DIGESTS.read_text())}
    for name in screenshots.SOURCES:
        assert 0 < (screenshots.IMAGES / f"{name}.png").stat().st_size < 100_000
    now = {name: screenshots.digest(name) for name in screenshots.SOURCES}
    monkeypatch.setattr(screenshots, "DIGESTS", tmp_path / "digests.json")
    screenshots.DIGESTS.write_text(json.dumps({**now, "report": "older"}))
    assert screenshots.stale() == ["report"]


def test_formulas_are_whole_and_the_site_has_what_it_needs_offline():
    for page in LINKING:
        text = page.read_text()
        for formula in re.findall(r"^```math\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL):
            assert formula.count("{") == formula.count("}"), formula
            assert formula.count(r"\begin") == formula.count(r"\end"), formula
    site = (ROOT / "mkdocs.yml").read_text()
    for file in re.findall(r"(?:polyfills: \[|extra_css: \[)([^]]+)", site):
        assert (DOCS / file).exists()


def test_a_metric_with_advice_has_a_range():
    assert [metric.name for metric in METRICS if metric.otherwise and not metric.healthy] == []


def test_every_reported_failure_names_tests_that_exist():
    text = (DOCS / "faults.md").read_text().partition("## Failures that users report\n")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    named = [re.findall(r"`(tests/[\w/]+\.py): (\w+)`", row) for row in rows]
    assert len(rows) == 7 and all(len(found) >= 3 for found in named)
    for file, test in (pair for found in named for pair in found):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}: {test}"
