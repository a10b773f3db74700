"""A figure's SVG made part of a page: ids of its own, no outer parts, words for those who cannot see it."""

from __future__ import annotations

import re
from html import escape


def inline(text: str, prefix: str, alternative: str) -> str:
    """The `svg` element alone; its ids begin with the prefix, so that several figures fit into one page."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    body = body.replace('xlink:href="data:', 'href="data:')
    opening, rest = body.split(">", maxsplit=1)
    view = re.search(r'viewBox="[^"]*"', opening)
    label = escape(" ".join(alternative.split()))
    rest = re.sub(r"\n\s*", "\n", rest)
    return f'<svg role="img" aria-label="{label}" {view.group() if view else ""}>{rest.strip()}'
