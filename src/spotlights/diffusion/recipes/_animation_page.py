"""The page of an animation; {{title}}, {{steps}}, {{text}} and {{data}} are filled in."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{title}}</title>
<style>
:root {
  --paper: #ffffff; --panel: #f6f7f8; --ink: #22262a; --soft: #5a6167; --accent: #1c64a3; --mask: #c3c8cd;
  --new: #ceeed8; --again: #ffe2be;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181a; --panel: #202326; --ink: #e4e6e8; --soft: #a0a6ac; --accent: #74b3ea; --mask: #4a5056;
    --new: #1f5234; --again: #6b4310;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1rem; max-width: 56rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.3rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
#text {
  background: var(--panel); border-radius: 6px; padding: 1rem; margin: 0 0 1rem; min-height: 6rem;
  font: 0.95rem/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.s1 { color: var(--mask); }
.s2 { background: var(--new); }
.s3 { background: var(--again); }
.s4 { color: var(--accent); font-weight: 600; }
.controls { display: flex; flex-wrap: wrap; gap: 0.75rem; align-items: center; }
button { font: inherit; padding: 0.3rem 0.9rem; min-width: 5.5rem; }
input[type=range] { flex: 1 1 12rem; accent-color: var(--accent); }
output { font-variant-numeric: tabular-nums; min-width: 8rem; }
.legend { color: var(--soft); font-size: 0.85rem; display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 1rem 0 0;
  padding: 0; list-style: none; }
.legend span { font-family: ui-monospace, "DejaVu Sans Mono", monospace; padding: 0 0.3em; }
.legend .s2, .legend .s3 { color: var(--ink); }
</style>
</head>
<body>
<h1>{{title}}</h1>
<div id="text" role="img" aria-label="Denoised text: {{text}}">{{text}}</div>
<div class="controls">
<button id="play" type="button">Play</button>
<input id="slider" type="range" min="0" max="{{steps}}" value="{{steps}}" aria-label="Step">
<output id="place" for="slider">step {{steps}} of {{steps}}</output>
</div>
<ul class="legend">
<li><span class="s1">&#9617;</span> masked</li>
<li><span class="s2">a</span> unmasked in this step</li>
<li><span class="s3">a</span> redrawn in this step</li>
<li><span class="s4">a</span> given</li>
</ul>
<script type="application/json" id="data">{{data}}</script>
<script>
"use strict";
const { first, changes } = JSON.parse(document.getElementById("data").textContent);
const text = document.getElementById("text"), slider = document.getElementById("slider");
const place = document.getElementById("place"), play = document.getElementById("play");
text.textContent = "";
const spans = first[0].map(() => text.appendChild(document.createElement("span")));
const frames = [first[0].map((piece, i) => [piece, first[1][i]])];
for (const change of changes) {
  const next = frames[frames.length - 1].slice();
  for (const [i, piece, state] of change) next[i] = [piece, state];
  frames.push(next);
}
let timer = 0;
function show(step) {
  frames[step].forEach(([piece, state], i) => {
    spans[i].textContent = piece;
    spans[i].className = "s" + state;
  });
  slider.value = step;
  place.textContent = "step " + step + " of " + changes.length;
}
function stop() {
  clearInterval(timer);
  timer = 0;
  play.textContent = "Play";
}
function start() {
  if (+slider.value === changes.length) show(0);
  play.textContent = "Pause";
  timer = setInterval(() => {
    show(+slider.value + 1);
    if (+slider.value === changes.length) stop();
  }, Math.min(400, Math.max(60, 6000 / changes.length)));
}
play.onclick = () => timer ? stop() : start();
slider.oninput = () => { stop(); show(+slider.value); };
show(changes.length);
if (changes.length && !matchMedia("(prefers-reduced-motion: reduce)").matches) { show(0); start(); }
</script>
</body>
</html>
"""
