// From a drift alarm to the tokens behind it: a row a token, its places below, each a link into its completion.

import { factList } from "./answer.js";
import { get } from "./api.js";
import { button, el, number, small, visible } from "./dom.js";
import { done } from "./overview.js";
import { link } from "./route.js";

// The tables of bebop/view/drift_tokens.py: its name there, a heading, what a row is.
const TABLES = [
  ["tokens", "Tokens that explain it", "by the token that the target finds likeliest at the place"],
  ["previous", "What stood before", "by the token before the place"],
  ["positions", "Where in a cycle", "by the place of the draft in its cycle"],
  ["turns", "Which turns", "by the turn of the trajectory, from 0"],
];
const HEADS = [
  ["share", "of the whole loss"], ["loss", "of mean overlap that entropy and the mix of places do not explain: 95 %"],
  ["before", "tested places in the steps before"], ["after", "tested places in the steps after"],
  ["overlap before", "mean Σ min(p, q)"], ["expected", "after, from the entropies"],
  ["overlap after", "mean Σ min(p, q)"],
];

/** The view of the alarm of a step. */
export async function alarmView(runs, run, step) {
  const found = await get(`runs/${run}/alarms/${step}`);
  const tables = TABLES.filter(([name]) => found[name]?.length);
  return {
    element: [head(found, step, tables.length > 0), ...tables.map((one) => table(found[one[0]], one, run))],
    keys: {
      j: () => focus(1), ArrowDown: () => focus(1), k: () => focus(-1), ArrowUp: () => focus(-1),
      Escape: () => (location.hash = "#/"), "/": () => (location.hash = link(["run", run], { find: 1 })),
    },
    help: [["j k ArrowDown ArrowUp", "next and previous token or place"], ["Enter", "open it"]],
  };
}

function focus(by) {
  const all = [...document.querySelectorAll("main .go")].filter((one) => one.offsetParent !== null);
  const next = all.indexOf(document.activeElement) + by;
  all[Math.max(0, Math.min(all.length - 1, next))]?.focus();
}

/** A point and its interval. */
function interval(triple) {
  if (!Array.isArray(triple) || triple[0] === null) return "–";
  const [point, low, high] = triple;
  const [a, b, c] = [point, low, high].map((value) => number(value, 4));
  return low === null || high === null ? a : `${a} [${b}, ${c}]`;
}

function head(found, step, some) {
  const steps = (ends) => (ends ? `${ends[0]} to ${ends[1]}` : "–");
  const facts = [["steps before", steps(found.before)], ["steps after", steps(found.after)]];
  if (found.answers) facts.push(["traced completions", found.answers.join(" and ")]);
  if (typeof found.change === "number") facts.push(["change of overlap", small(found.change)]);
  if (typeof found.explained === "number") facts.push(["explained by entropy and mix", small(found.explained)]);
  if (found.loss) facts.push(["lost beyond that", interval(found.loss)]);
  return el("section", { class: "card" },
    el("h2", {}, `Step ${step} `, el("span", { class: `badge ${found.state}` }, found.state ?? "")),
    el("p", {}, found.evidence ?? ""), found.action ? el("p", { class: "muted" }, done(found.action)) : null,
    factList(facts), found.note ? el("p", {}, found.note) : null,
    some ? el("p", { class: "muted" }, "Choose a row to see its worst places; each opens in its completion.") : null);
}

function table(rows, [name, title, what], run) {
  const heads = [[what.startsWith("by the token") ? "token" : "place", what], ...HEADS];
  return el("section", { class: "card", "aria-label": title },
    el("h2", {}, title), el("p", { class: "muted" }, `${what}.`),
    el("div", { class: "scroll" }, el("table", { class: "explained", "data-table": name },
      el("thead", {}, el("tr", {}, heads.map(([text, hint]) => el("th", { scope: "col", title: hint }, text)))),
      el("tbody", {}, rows.map((row) => rowOf(row, run))))));
}

/** Two rows: a token's numbers, and below them its worst places, shown once it is chosen. */
function rowOf(row, run) {
  const share = typeof row.share === "number" ? `${(100 * row.share).toFixed(1)} %` : "–";
  const cells = [share, interval(row.loss), row.count_before, row.count_after, small(row.overlap_before),
    small(row.expected), small(row.overlap_after)];
  const places = el("tr", { class: "examples", hidden: true }, el("td", { colspan: cells.length + 1 },
    el("ul", {}, (row.examples ?? []).map((one) => example(one, run)))));
  const open = button(visible(row.piece), () => {
    places.hidden = !places.hidden;
    open.setAttribute("aria-expanded", String(!places.hidden));
  }, { class: "go piece", "aria-expanded": "false", title: `id ${row.id}` });
  const made = el("tr", {}, el("th", { scope: "row" }, open), cells.map((value) => el("td", {}, value ?? "–")));
  made.addEventListener("click", (event) => event.target.closest("button") || open.click());
  return [made, places];
}

function example(one, run) {
  const where = `overlap ${small(one.overlap)} · step ${one.step}, completion ${one.answer}, token ${one.place}`;
  const href = link(["run", run, "answer", one.answer], { token: one.place });
  return el("li", {}, el("a", { class: "go example", href },
    el("span", { class: "context" }, visible(one.context ?? ""), el("mark", {}, visible(one.token ?? ""))),
    el("span", { class: "muted" }, where)));
}
