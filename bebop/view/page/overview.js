// The first page: the runs, their curves, their drift alarms.

import { get, loadPlotly } from "./api.js";
import { el } from "./dom.js";
import { link } from "./route.js";
import { color } from "./theme.js";

const LINES = ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5"]; // colours in the style sheet

/** The view; `runs` as /api/runs lists them. */
export async function overview(runs) {
  const cards = el("section", { class: "runs", "aria-label": "Runs" });
  const plots = el("section", { class: "plots", "aria-label": "Curves" });
  const alarms = el("section", { class: "card", "aria-label": "Drift alarms" });
  const page = { curves: [], alarms: [] };

  const load = async () => {
    page.curves = await Promise.all(runs.map((_, run) => get(`runs/${run}/curves`)));
    page.alarms = await Promise.all(runs.map((_, run) => get(`runs/${run}/alarms`)));
    cards.replaceChildren(...runs.map(card));
    alarms.replaceChildren(...alarmList(runs, page.alarms.map((found) => found.alarms)));
  };
  const draw = () => drawCurves(plots, runs, page.curves).catch((error) => plots.replaceChildren(error.message));
  window.addEventListener("themechange", draw);
  await load();
  return {
    element: [cards, alarms, plots],
    shown: draw,
    refresh: async () => {
      await load();
      draw();
    },
    leave: () => window.removeEventListener("themechange", draw),
    keys: {
      ArrowDown: () => step(1), j: () => step(1), ArrowUp: () => step(-1), k: () => step(-1),
      "/": () => (location.hash = link(["run", 0], { find: 1 })),
    },
    help: [["j k ArrowDown ArrowUp", "next and previous run or alarm"], ["Enter", "open it"]],
  };
}

/** Move the focus along runs and alarms. */
function step(by) {
  const all = [...document.querySelectorAll("main a.go")];
  const next = all.indexOf(document.activeElement) + by;
  all[Math.max(0, Math.min(all.length - 1, next))]?.focus();
}

function card(run, number) {
  const facts = [
    ["system", run.system ?? "–"], ["completions", run.answers.toLocaleString("en")], ["newest step", run.step ?? "–"],
  ];
  const waiting = run.state === "waiting" ? "The job has started; its first completions come with its first step." : "";
  return el("a", { class: "card go run", href: link(["run", number]), title: run.path },
    el("h2", {}, swatch(number), run.name, el("span", { class: `badge ${run.state}` }, run.state)),
    el("dl", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    waiting ? el("p", { class: "muted" }, waiting) : null);
}

const swatch = (number) => el("i", { class: `swatch ${LINES[number % LINES.length]}`, "aria-hidden": "true" });

function alarmList(runs, found) {
  const rows = found.flatMap((alarms, run) => alarms.map((alarm) => ({ run, ...alarm })));
  if (!rows.length) {
    const why = "None: the drift monitor's state did not change and it proposed nothing.";
    return [el("h2", {}, "Drift alarms"), el("p", { class: "muted" }, why)];
  }
  rows.sort((a, b) => b.step - a.step);
  const items = rows.map((alarm) => el("li", {},
    el("a", { class: "go alarm", href: link(["run", alarm.run, "alarm", alarm.step]) },
      el("b", {}, `step ${alarm.step}`), el("span", { class: `badge ${alarm.state}` }, alarm.state),
      runs.length > 1 ? el("span", { class: "muted" }, runs[alarm.run].name) : null,
      el("span", { class: "grow" }, alarm.evidence ?? ""), el("span", { class: "muted" }, done(alarm.action)))));
  return [el("h2", {}, "Drift alarms"), el("ul", { class: "alarms" }, items)];
}

/** An action in words. */
export function done(action) {
  if (!action || action.kind === "none") return "nothing to be done";
  const value = action.value === null || action.value === undefined ? "" : ` ${action.value}`;
  return `${action.kind}${value} (${action.carried_out ? "carried out" : "advice"})`;
}

/** One plot a metric, a line a run; a click on a point opens the completions of its step. */
async function drawCurves(place, runs, curves) {
  const names = [...new Set(curves.flatMap((found) => Object.keys(found.columns)))];
  if (!names.length) {
    place.replaceChildren(el("p", { class: "card muted" }, "No step is finished yet: curves come with the first."));
    return;
  }
  const Plotly = await loadPlotly();
  // All places first: a plot takes the width that its place has when it is drawn.
  const boxes = names.map((name) => {
    const there = [...place.children].find((child) => child.dataset.metric === name);
    return there ?? plotBox(name, curves.find((found) => found.labels[name]).labels[name]);
  });
  if (boxes.some((box) => box.parentNode !== place)) place.replaceChildren(...boxes);
  for (const [i, name] of names.entries()) {
    const box = boxes[i];
    const drawn = curves.flatMap((found, run) => (found.columns[name] ? [line(found, name, run, runs)] : []));
    const target = box.querySelector(".plot");
    await Plotly.react(target, drawn, layout(curves), { responsive: true, displayModeBar: false });
    target.removeAllListeners?.("plotly_click");
    target.on("plotly_click", ({ points: [point] }) => {
      location.hash = link(["run", point.data.run], { min_step: point.x, max_step: point.x });
    });
  }
}

function plotBox(name, { label, unit }) {
  return el("figure", { class: "card", "data-metric": name },
    el("figcaption", {}, el("b", {}, label), el("span", { class: "muted" }, ` ${unit}`)),
    el("div", { class: "plot", role: "img", "aria-label": `${label} over steps` }));
}

function line(found, name, run, runs) {
  const few = found.columns[name].filter((value) => value !== null).length < 60;
  return {
    x: found.steps, y: found.columns[name], run, name: escapeHtml(runs[run].name), type: "scatter",
    mode: few ? "lines+markers" : "lines", connectgaps: true, line: { color: color(LINES[run % LINES.length]), width: 2 },
    hovertemplate: `step %{x}: %{y:.3f}<extra>${runs.length > 1 ? escapeHtml(runs[run].name) : ""}</extra>`,
  };
}

/** plotly.js reads a few tags in its labels; a name is no place for them. */
const escapeHtml = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%", "&#37;");

function layout(curves) {
  const few = Math.max(...curves.map((found) => found.steps.length)) <= 10;
  const axis = { gridcolor: color("line"), zeroline: false, automargin: true, tickfont: { size: 12 } };
  return {
    margin: { l: 44, r: 10, t: 6, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("muted"), size: 12 }, showlegend: false, hovermode: "closest", dragmode: false,
    xaxis: { ...axis, title: { text: "step", font: { size: 12 }, standoff: 4 }, dtick: few ? 1 : null },
    yaxis: { ...axis, rangemode: "tozero" },
  };
}
