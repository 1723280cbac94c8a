// From a drift alarm to the tokens behind it: a row a token, its examples below, each a link to the place.

import { get } from "./api.js";
import { button, el, number, small, visible } from "./dom.js";
import { link } from "./route.js";

/** The view of the alarm of a step; what it shows is made by bebop/view/drift_tokens.py. */
export async function alarmView(runs, run, step) {
  const found = await get(`runs/${run}/alarms/${step}`);
  const rows = (found.tokens ?? []).map((token) => tokenRow(token, run));
  const positions = (found.positions ?? []).filter((one) => one && typeof one === "object");
  return {
    element: [head(found, step), rows.length ? tokenTable(rows) : null, positions.length ? positionTable(positions) : null].filter(Boolean),
    keys: {
      j: () => focus(1), ArrowDown: () => focus(1), k: () => focus(-1), ArrowUp: () => focus(-1),
      Escape: () => (location.hash = "#/"),
    },
    help: [["j k ArrowDown ArrowUp", "next and previous token or example"], ["Enter", "open it"]],
  };
}

function focus(by) {
  const all = [...document.querySelectorAll("main .go")].filter((one) => one.offsetParent !== null);
  const next = all.indexOf(document.activeElement) + by;
  all[Math.max(0, Math.min(all.length - 1, next))]?.focus();
}

const steps = (ends) => (Array.isArray(ends) ? `${ends[0]} to ${ends[1]}` : "–");

function head(found, step) {
  const facts = [];
  if (found.before) facts.push(["steps before", steps(found.before)]);
  if (found.after) facts.push(["steps after", steps(found.after)]);
  if (typeof found.change === "number") facts.push(["change", number(found.change, 3)]);
  return el("section", { class: "card" },
    el("h2", {}, `Step ${step} `, el("span", { class: `badge ${found.state}` }, found.state ?? "")),
    el("p", {}, found.evidence ?? ""),
    facts.length ? el("dl", { class: "facts wide" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))) : null,
    found.note ? el("p", { class: "muted" }, found.note) : null);
}

/** Two rows of the table: the token, and below it its examples, shown when it is chosen. */
function tokenRow(token, run) {
  const examples = el("tr", { class: "examples", hidden: true }, el("td", { colspan: 7 },
    el("ul", {}, (token.examples ?? []).map((one) => example(one, run)))));
  const open = button(visible(token.piece), () => {
    examples.hidden = !examples.hidden;
    open.setAttribute("aria-expanded", String(!examples.hidden));
  }, { class: "go piece", "aria-expanded": "false", title: `id ${token.id}` });
  const share = typeof token.share === "number" ? `${(100 * token.share).toFixed(1)} %` : "–";
  const cells = [share, small(token.loss ?? null), token.count_before, token.count_after, small(token.overlap_before ?? null),
    small(token.expected ?? null), small(token.overlap_after ?? null)];
  const row = el("tr", {}, el("th", { scope: "row" }, open), cells.map((value) => el("td", {}, value ?? "–")));
  row.addEventListener("click", (event) => event.target.closest("button") || open.click());
  examples.firstChild.setAttribute("colspan", cells.length + 1);
  return [row, examples];
}

function example(one, run) {
  const where = link(["run", run, "answer", one.answer], { token: one.place });
  return el("li", {}, el("a", { class: "go example", href: where },
    el("span", { class: "context" }, visible(one.context ?? "")),
    el("span", { class: "muted" }, `overlap ${small(one.overlap ?? null)}, expected ${small(one.expected ?? null)} · answer ${one.answer}, token ${one.place}`)));
}

function tokenTable(rows) {
  const heads = [
    ["token", ""], ["share", "of the loss of overlap"], ["loss", "of overlap that its entropy does not explain"],
    ["before", "tested places before"], ["after", "tested places after"], ["overlap before", ""],
    ["expected", "after, from its entropy"], ["overlap after", ""],
  ];
  return el("section", { class: "card", "aria-label": "Tokens" }, el("h2", {}, "Tokens that explain it"),
    el("p", { class: "muted" }, "Choose a token to see where it stands, and a place to see it in its answer."),
    el("div", { class: "scroll" }, el("table", { class: "explained" },
      el("thead", {}, el("tr", {}, heads.map(([name, title]) => el("th", { scope: "col", title }, name)))),
      el("tbody", {}, rows))));
}

function positionTable(positions) {
  const heads = Object.keys(positions[0]);
  const shown = (value) => (typeof value === "number" && !Number.isInteger(value) ? small(value) : String(value ?? "–"));
  return el("section", { class: "card", "aria-label": "Positions" }, el("h2", {}, "By place"),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name.replaceAll("_", " "))))),
      el("tbody", {}, positions.map((row) => el("tr", {}, heads.map((name) => el("td", {}, shown(row[name])))))))));
}
