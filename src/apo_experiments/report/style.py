"""The style sheet of the report: light and dark, wide and narrow, screen and paper."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --text: #1d232b; --muted: #5b6672; --line: #d9dee4; --card: #f6f7f9; --page: #ffffff; --accent: #b34700;
  --ours: #fdf1e780; --shade: #0000003d;
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7eb; --muted: #9aa5b1; --line: #353c45; --card: #1d2127; --page: #14171b; --accent: #ff9a55;
    --ours: #4a301c80; --shade: #000000d0; }
  /* Figures are drawn on white: turned round they keep their hues. */
  figure img { filter: invert(0.92) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 64rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 0.4rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0; }
h3 { font-size: 1rem; margin: 1.6rem 0 0.4rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
a { color: var(--accent); }
.muted { color: var(--muted); }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.5rem; scroll-margin-top: 1rem; }
.origin { color: var(--muted); font-size: 0.9rem; margin: 0.15rem 0 0.8rem; }
/* A shade on the edge of a table that scrolls says that there is more; at the end the page's colour covers it. */
.scroll {
  overflow-x: auto; scrollbar-width: thin; margin: 0.8rem 0; background:
    linear-gradient(to right, var(--page) 45%, transparent) left / 2.5rem 100% local,
    linear-gradient(to left, var(--page) 45%, transparent) right / 2.5rem 100% local,
    linear-gradient(to right, var(--shade), transparent) left / 0.9rem 100% scroll,
    linear-gradient(to left, var(--shade), transparent) right / 0.9rem 100% scroll;
  background-repeat: no-repeat;
}
/* The contents at the side of a wide window; in a narrow one the first table serves. */
nav { display: none; }
@media screen and (min-width: 80rem) {
  body { padding-left: 18rem; max-width: 82rem; }
  nav { display: block; position: fixed; inset: 0 auto 0 max(0px, 50vw - 41rem); width: 16rem; overflow-y: auto;
    padding: 2rem 1rem; border-right: 1px solid var(--line); font-size: 0.86rem; line-height: 1.4; }
  nav ul { list-style: none; margin: 0.4rem 0 0; padding: 0; }
  nav li { margin: 0.25rem 0; overflow-wrap: anywhere; }
  nav a { text-decoration: none; }
  nav a:hover { text-decoration: underline; }
  nav .muted a { color: var(--muted); }
}
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
.overview table { width: 100%; }
th, td { padding: 0.32rem 0.7rem 0.32rem 0.4rem; text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); font-weight: 600; vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
tr.ours > * { background: var(--ours); }
b.best { font-weight: 700; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
@media screen and (max-width: 40rem) {  /* three panels beside each other cannot be read at a third of their size */
  figure { overflow-x: auto; }
  figure img { max-width: none; width: 44rem; }
}
code, pre { font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--card); padding: 0.6rem 0.8rem; border-radius: 6px; overflow-x: auto; margin: 0.5rem 0; }
ul.findings { margin: 0.6rem 0; padding-left: 1.2rem; max-width: 46rem; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; color: var(--muted); font-size: 0.92rem; }
details table { font-size: 0.84rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; font-size: 0.86rem; margin: 0.5rem 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.todo { background: var(--card); border-radius: 6px; padding: 0.7rem 0.9rem; }
@media print {
  :root { color-scheme: light; --text: #000; --muted: #444; --line: #bbb; --card: #f3f3f3; --page: #fff;
    --accent: #000; --ours: #f3f3f3; --shade: transparent; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  figure img { filter: none; }
  figure, table, tr, pre { break-inside: avoid; }
  h2, h3, .origin, section > p { break-after: avoid; }
  /* Paper cannot be clicked. */
  details::details-content { content-visibility: visible; }
  .scroll, pre { overflow: visible; white-space: normal; }
}
"""
