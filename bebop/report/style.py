"""How the report looks (one column below 860 px, no text under 12 px) and the script that draws its plots."""

CSS = """
:root { --ink: #1f2933; --muted: #52606d; --line: #e1e5ea; --page: #f6f7f9; --card: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; -webkit-text-size-adjust: 100%; }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 32px; }
.kicker { margin: 0; color: var(--muted); font-size: 13px; letter-spacing: .02em; }
h1 { margin: 2px 0 20px; font-size: 28px; line-height: 1.2; font-weight: 650; overflow-wrap: anywhere; }
.opening { margin: 0 0 20px; padding: 14px 18px; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid #2563a8; border-radius: 10px; overflow-wrap: anywhere; }
.opening p { margin: 0; max-width: 100ch; }
.verdict { font-size: 18px; line-height: 1.45; font-weight: 600; }
.opening .advice { margin: 4px 0 12px; font-size: 16px; }
.opening .advice:last-child { margin-bottom: 0; }
.opening .note { color: var(--muted); font-size: 13px; }
code { font-size: .92em; }
.opening code { font-size: 13px; }
.advice code:last-child { display: block; margin-top: 2px; }
details { margin-top: 10px; font-size: 13px; }
summary { cursor: pointer; color: var(--muted); }
pre { margin: 8px 0 0; font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
h2 { margin: 0 0 6px; font-size: 17px; font-weight: 620; }
/* Two cards in a row; one that has no neighbour takes all of it. */
main { display: flex; flex-wrap: wrap; gap: 18px; padding-bottom: 48px; }
.card { min-width: 0; flex: 1 1 calc(50% - 9px); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; }
.card > p { margin: 8px 0 0; color: var(--muted); font-size: 14px; max-width: 90ch; overflow-wrap: anywhere; }
.card > p.note { font-size: 13px; }
.wide, noscript { flex-basis: 100%; }
.plots { display: flex; flex-wrap: wrap; gap: 10px 22px; }
figure { margin: 0; min-width: 0; flex: 1 1 max(min(100%, 300px), 100% / var(--across) - 22px); }
figcaption { color: var(--muted); font-size: 13px; margin-top: 4px; overflow-wrap: anywhere; }
.plot { height: 260px; width: 100%; overflow: hidden; }
.wide .plot { height: 230px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 6px; margin: 0 -6px; }
.key { display: inline-flex; align-items: center; gap: 7px; padding: 3px 6px; border: 0; border-radius: 6px;
  background: none; color: var(--ink); font: inherit; font-size: 13px; text-align: left; overflow-wrap: anywhere; }
button.key { cursor: pointer; }
button.key:hover { background: var(--page); }
.key[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.swatch { flex: none; display: inline-block; width: 20px; border-top: 3px solid currentColor; }
.swatch.dashed { border-top-style: dashed; border-top-width: 2px; }
.swatch.faint { opacity: .45; border-top-width: 2px; }
.swatch.block { width: 12px; height: 12px; border: 0; border-radius: 3px; background: currentColor; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 14px 7px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
thead th { color: var(--muted); font-weight: 500; font-size: 13px; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
tbody th { font-weight: 600; min-width: 9ch; }
/* Short words, which a column is to be wide enough for. */
@media (min-width: 861px) { tbody th, td[data-head=study] { overflow-wrap: break-word; } }
tbody th .swatch { margin-right: 8px; vertical-align: middle; }
@media (max-width: 860px) {
  main { gap: 12px; }
  .card { flex-basis: 100%; }
  header, main { padding-left: 12px; padding-right: 12px; }
  header { padding-top: 20px; }
  .card { padding: 14px; }
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: block; padding: 6px 0; }
  tbody tr:first-child { border-top: 0; }
  tbody th { display: block; padding: 4px 0; }
  td { display: flex; justify-content: space-between; gap: 16px; padding: 3px 0; text-align: right; }
  td::before { content: attr(data-head); color: var(--muted); text-align: left; overflow-wrap: normal; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""

SCRIPT = """
const touch = matchMedia('(pointer: coarse)').matches;
const plots = FIGURES.map((figure, i) => {
  const plot = document.getElementById('plot-' + i);
  // A finger that moves over a plot scrolls the page.
  if (touch) figure.layout.dragmode = false;
  Plotly.newPlot(plot, figure.data, figure.layout, {responsive: true, displayModeBar: false});
  return plot;
});
document.querySelectorAll('button.key').forEach(button => button.addEventListener('click', () => {
  const shown = button.getAttribute('aria-pressed') === 'false';
  const group = button.dataset.group;
  document.querySelectorAll('button.key').forEach(other => {
    if (other.dataset.group === group) other.setAttribute('aria-pressed', shown);
  });
  plots.forEach(plot => {
    const hit = plot.data.flatMap((trace, i) => trace.legendgroup === group ? [i] : []);
    if (hit.length) Plotly.restyle(plot, {visible: shown}, hit);
  });
}));
"""
