"""What `make docs` does beside building docs/: measured results and the changelog, which the pages
link to and which stand elsewhere in the repository, become pages of the site."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
FURTHER = ("CHANGELOG.md", "benchmarks/results/*.md")
LINK = re.compile(r"(\]\()([\w./-]+\.md)(?=[)#])")


def on_config(config):
    # anchors as the web views of Git hosts make them, so that a link holds in both
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files, config):
    for path in _further():
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown, page, config, files):
    at = Path(page.file.abs_src_path)

    def moved(match):
        target = (at.parent / match[2]).resolve()
        if target not in _further() and not target.is_relative_to(ROOT / "docs"):
            return match[0]  # the strict build then names it
        return match[1] + os.path.relpath(_uri(target), Path(page.file.src_uri).parent)

    return LINK.sub(moved, markdown)


def _further():
    return [path for pattern in FURTHER for path in sorted(ROOT.glob(pattern))]


def _uri(path):
    """Where the site has a page of the repository."""
    inside = path.is_relative_to(ROOT / "docs")
    return path.relative_to(ROOT / "docs" if inside else ROOT).as_posix()
