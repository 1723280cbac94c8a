// Draws the plots in FIGURES; a key of a legend shows and hides the traces of its group.
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
