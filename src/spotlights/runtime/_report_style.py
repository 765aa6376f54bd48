"""The style sheet of the report page."""

CSS = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f8; --ink: #22262a; --soft: #5a6167; --line: #d9dde0; --accent: #1c64a3;
  --wrong: #b3261e;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #16181a; --panel: #202326; --ink: #e4e6e8; --soft: #a0a6ac; --line: #3a3f44; --accent: #74b3ea;
    --wrong: #ff8f85;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: clamp(1.5rem, 6vw, 4.5rem) clamp(1rem, 5vw, 2rem) 3rem; max-width: 48rem;
  background: var(--paper); color: var(--ink);
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  overflow-wrap: break-word; -webkit-text-size-adjust: 100%; text-size-adjust: 100%;
}
h1, h2 { line-height: 1.2; letter-spacing: -0.015em; font-weight: 650; text-wrap: balance; }
h1 { font-size: clamp(1.7rem, 1.2rem + 2.4vw, 2.5rem); margin: 0 0 0.6em; }
h2 { font-size: 1.4rem; margin: 0 0 0.7rem; }
p { margin: 0 0 1rem; max-width: 42rem; text-wrap: pretty; }
section { margin-top: 3rem; padding-top: 1.5rem; border-top: 1px solid var(--line); }
.summary { font-size: 1.2rem; line-height: 1.5; margin-bottom: 1.4rem; }
.facts { display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; margin: 0 0 2rem; color: var(--soft); font-size: 0.85rem; }
.facts dt, .facts dd { display: inline; margin: 0; }
.facts dd { color: var(--ink); }
.table { margin: 1.2rem 0 1.6rem; }
.table figcaption { margin: 0 0 0.5rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 4px; }
table { border-collapse: collapse; min-width: 100%; font-size: 0.95rem; line-height: 1.4;
  font-variant-numeric: tabular-nums lining-nums; border-bottom: 1.5px solid var(--ink); }
th, td { text-align: left; vertical-align: baseline; padding: 0.45rem 0.75rem; font-weight: 400;
  overflow-wrap: normal; }
thead th { font-weight: 600; font-size: 0.85rem; vertical-align: bottom; border-top: 1.5px solid var(--ink);
  border-bottom: 1px solid var(--ink); }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.number { text-align: right; }
td.number { white-space: nowrap; }
thead th { min-width: 5em; }
tbody th { min-width: 8.5em; }
.highlight > * { font-weight: 650; background: var(--panel); }
.highlight > :first-child { box-shadow: inset 3px 0 var(--accent); }
figure { margin: 1.6rem 0; }
figure img { display: block; max-width: 100%; height: auto; }
figure.plain img { background: #fff; border-radius: 4px; }
figcaption { margin-top: 0.6rem; color: var(--soft); font-size: 0.9rem; max-width: 42rem; }
.gallery { list-style: none; margin: 1.4rem 0; padding: 0; display: grid; gap: 1.3rem 1rem;
  grid-template-columns: repeat(auto-fill, minmax(calc(var(--cell) + 2px), 1fr)); }
.gallery li { break-inside: avoid; font-size: 0.85rem; line-height: 1.4; min-width: 0; }
.gallery img { display: block; max-width: 100%; height: auto; border: 1px solid var(--line); box-sizing: content-box;
  margin-bottom: 0.4rem; }
.gallery .crisp { image-rendering: pixelated; }
.gallery .caption { display: block; white-space: pre-line; }
.gallery .verdict { color: var(--soft); }
.gallery .wrong img { outline: 3px solid var(--wrong); outline-offset: -1px; }
.gallery .wrong .verdict { color: var(--wrong); font-weight: 650; }
footer { margin-top: 4rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 36rem) { th, td { padding-inline: 0.5rem; } }
@media print {
  :root { color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  section { margin-top: 1.6rem; }
  h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  .highlight > *, .wrong img { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
