"""What `make docs` does beside building docs/: files elsewhere in the repository that pages link to
become part of the site, as pages where they are Markdown. So do measured results and the changelog,
linked or not. The tags of bash blocks (`tests/run_documented.py`) are left out, formulas become
MathML, and a table's code loses the backslashes that Git hosts need before a bar."""

import os
import re
from functools import cache
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ALWAYS = ("CHANGELOG.md", "benchmarks/results/*.md")
TAGGED = re.compile(r"^(```bash) \w+$", re.MULTILINE)
MATH = re.compile(r"^```math\n(.+?)\n```$", re.MULTILINE | re.DOTALL)
CELL_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
LINK = re.compile(r"(\]\()([^()\s:#]+)(?=[)#])")


def on_config(config):
    # anchors as the web views of Git hosts make them, so that a link holds in both
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files, config):
    for path in sorted(_further()):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown, page, config, files):
    at = Path(page.file.abs_src_path)

    def moved(match):
        target = (at.parent / match[2]).resolve()
        if target not in _further() and not (target.is_relative_to(DOCS) and target.is_file()):
            return match[0]  # the strict build then names it
        return match[1] + os.path.relpath(_uri(target), Path(page.file.src_uri).parent)

    return _readable(TAGGED.sub(r"\1", LINK.sub(moved, markdown)))


def _readable(markdown):
    lines = [_cells(line) if line.startswith("|") else line for line in markdown.split("\n")]
    return MATH.sub(_formula, "\n".join(lines))


def _cells(row):
    return CELL_CODE.sub(lambda code: code[0].replace("\\|", "|"), row)


def _formula(found):
    return f'<div class="formula">{convert(found[1], display="block")}</div>\n'


@cache
def _further():
    """Files outside docs/ that the site needs: ALWAYS, and what its pages link to, step by step."""
    found = {path for pattern in ALWAYS for path in ROOT.glob(pattern)}
    unread = [*DOCS.rglob("*.md"), *found]
    while unread:
        page = unread.pop()
        linked = {(page.parent / link).resolve() for _, link in LINK.findall(page.read_text())}
        new = {path for path in linked - found if _is_outside(path)}
        found |= new
        unread += [path for path in new if path.suffix == ".md"]
    return found


def _is_outside(path):
    return path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)


def _uri(path):
    """Where the site has a file of the repository."""
    inside = path.is_relative_to(DOCS)
    return path.relative_to(DOCS if inside else ROOT).as_posix()
