"""How the page looks: on wide and narrow screens, in the dark, and on paper."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --raised: #ffffff; --ink: #1d2126; --soft: #59636e; --rule: #dcdfe3; --faint: #f3f4f2;
  --accent: #b8430b;
  --serif: Charter, "Bitstream Charter", "Iowan Old Style", "Source Serif 4", Georgia, serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --raised: #1a1e22; --ink: #e4e6e8; --soft: #9ca6b0; --rule: #31373d; --faint: #1f2429;
    --accent: #ff9a5a;
  }
  figure svg { filter: invert(1) hue-rotate(180deg) brightness(1.25); }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0 auto; max-width: 62rem; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw, 2.5rem) 4rem;
  background: var(--paper); color: var(--ink); font: 1.0625rem/1.6 var(--serif); overflow-wrap: break-word;
}
header { border-bottom: 1px solid var(--rule); padding-bottom: 1.75rem; }
.kicker { margin: 0 0 .6rem; color: var(--accent); font: 600 .78rem/1.4 var(--sans); letter-spacing: .09em;
  text-transform: uppercase; }
h1 { margin: 0 0 1rem; font-size: clamp(1.7rem, 4.6vw, 2.5rem); line-height: 1.15; font-weight: 600;
  letter-spacing: -.012em; text-wrap: balance; }
h2 { margin: 3.25rem 0 .5rem; font-size: 1.45rem; line-height: 1.25; font-weight: 600; }
p { margin: .6rem 0; max-width: 44rem; }
.lead { font-size: 1.18rem; line-height: 1.55; }
a { color: var(--accent); text-underline-offset: .15em; text-decoration-thickness: 1px; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; margin: 1.25rem 0 0; padding: 0; list-style: none;
  font: .9rem/1.5 var(--sans); }
.setup, .note, figcaption, footer { color: var(--soft); font: .84rem/1.5 var(--sans); }
.setup { max-width: none; }
.note { margin: .4rem 0; max-width: 52rem; }
.remark { border-left: 3px solid var(--accent); padding: .1rem 0 .1rem .9rem; }
.best { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: 0; margin: 1.5rem 0;
  border: 1px solid var(--rule); border-radius: .5rem; background: var(--raised); overflow: hidden; }
.best div { padding: .9rem 1.1rem; box-shadow: -1px -1px 0 var(--rule); }
.best dt { color: var(--soft); font: .8rem/1.4 var(--sans); }
.best dd { margin: .15rem 0 0; font: 600 1.2rem/1.3 var(--sans); font-variant-numeric: tabular-nums; }
.best dd + dd { color: var(--soft); font-size: .95rem; font-weight: 400; }
.scroll { overflow-x: auto; margin: 1.5rem 0 .6rem; }
table { width: 100%; border-collapse: collapse; font: .88rem/1.4 var(--sans);
  font-variant-numeric: tabular-nums; border-bottom: 1.5px solid var(--ink); }
caption { padding: 0 0 .5rem; text-align: left; font-weight: 600; }
th, td { padding: .42rem .7rem; text-align: right; white-space: nowrap; }
thead th { border-top: 1.5px solid var(--ink); border-bottom: 1px solid var(--ink); color: var(--soft);
  font-weight: 500; white-space: normal; vertical-align: bottom; min-width: 4.2rem; }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
th:first-child { position: sticky; left: 0; padding-left: .2rem; background: var(--paper); text-align: left;
  font-weight: 500; min-width: 8.5rem; white-space: normal; }
tbody tr:hover > * { background: var(--faint); }
td strong, th strong { color: var(--accent); font-weight: 700; }
figure { margin: 2rem 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { margin-top: .6rem; max-width: 52rem; }
details { border-top: 1px solid var(--rule); font-family: var(--sans); font-size: .88rem; }
details:last-of-type { border-bottom: 1px solid var(--rule); }
summary { display: flex; flex-wrap: wrap; gap: .1rem .8rem; padding: .55rem .2rem; cursor: pointer; }
summary::before { content: "+"; width: .8rem; color: var(--accent); font-weight: 600; }
details[open] > summary::before { content: "–"; }
summary::-webkit-details-marker { display: none; }
summary .end { margin-left: auto; color: var(--soft); }
summary .bad { color: var(--accent); font-weight: 600; }
.facts { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .2rem 1.2rem;
  margin: .5rem 0 1rem; font: .86rem/1.5 var(--sans); }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
details .facts { padding-left: 1.6rem; }
code, pre { font-family: var(--mono); font-size: .84rem; }
pre { margin: .6rem 0; padding: .8rem 1rem; overflow-x: auto; border: 1px solid var(--rule);
  border-radius: .4rem; background: var(--faint); }
details pre { margin-left: 1.6rem; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
@media (max-width: 40rem) {
  body { font-size: 1rem; }
  .lead { font-size: 1.08rem; }
  th, td { padding: .4rem .55rem; }
  th:first-child { max-width: 42vw; }
  figure { overflow-x: auto; }
  figure svg { min-width: 34rem; }
  .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: .5rem; }
}
@media print {
  :root { color-scheme: light; --paper: #fff; --raised: #fff; --ink: #000; --soft: #444; --rule: #bbb;
    --faint: #fff; --accent: #000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  figure svg { filter: none; }
  .scroll, figure, tr, .best { break-inside: avoid; overflow: visible; }
  h2, caption { break-after: avoid; }
  th, td { padding: .25rem .35rem; white-space: normal; }
}
"""
