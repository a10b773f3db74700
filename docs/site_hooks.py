"""What the site needs beyond mkdocs itself; mkdocs.yml names this file.

* README, changelog and the page for contributors are pages of the site, too, and are written only once.
* A link to a file that is no page (a source, an example) becomes the file's name.
* A formula becomes MathML, which browsers draw by themselves: without a script, a font or a network.
* A page that would load something from elsewhere is an error.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

PAGES_FROM_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
BAR = "<mo>&#x02016;</mo>"  # of a norm; browsers would stretch the left one and the right one differently
LOADED = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?P<url>(?:https?:)?//[^"'\s>]+)"""
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](?P<tex>.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are kept in the repository's root."""
    for uri, name in PAGES_FROM_ROOT.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links, which hold in the repository, to where things are on the site."""
    uri = page.file.src_uri
    written_in = ROOT / PAGES_FROM_ROOT[uri] if uri in PAGES_FROM_ROOT else DOCS / uri
    uris = {(ROOT / name).resolve(): DOCS / uri for uri, name in PAGES_FROM_ROOT.items()}

    def moved(link: re.Match[str]) -> str:
        target = (written_in.parent / link["target"]).resolve()
        target = uris.get(target, target)
        if target.is_relative_to(DOCS):
            relative = Path(os.path.relpath(target, (DOCS / uri).parent)).as_posix()
            return f"[{link['text']}]({relative}{link['anchor'] or ''})"
        if not target.exists():
            return link[0]  # mkdocs says what is wrong
        name = f"`{target.relative_to(ROOT).as_posix()}`"
        return name if link["text"].strip("`/") in name else f"{link['text']} ({name})"

    return LINK.sub(moved, markdown)


def on_page_content(html_text: str, /, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the formulas."""

    def drawn(formula: re.Match[str]) -> str:
        tex = html.unescape(formula["tex"]).strip()
        inline = formula[1] == "span"
        mathml = convert(tex, display="inline" if inline else "block")
        if "\\" in mathml:
            raise PluginError(f"{page.file.src_uri}: latex2mathml does not know all of the formula {tex!r}.")
        mathml = mathml.replace(BAR, BAR.replace("<mo>", '<mo stretchy="false">'))
        return mathml if inline else f'<div class="formula">{mathml}</div>'

    return FORMULA.sub(drawn, html_text)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Hold the promise that the site is read without a network."""
    loaded = LOADED.search(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} would load {loaded['url']}. Keep a copy, or do without it.")
    return output
