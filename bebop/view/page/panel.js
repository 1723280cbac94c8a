// All that is known of one token: numbers, and p and q side by side.

import { button, copy, el, small, visible } from "./dom.js";
import { VERDICTS } from "./tokens.js";

const TINY = 0.001; // tokens whose p and q are both below it get no bar

/** The panel of place `i`; `about`: what the copied JSON says beside it. */
export function tokenPanel(tokens, i, about) {
  const one = tokens.describe(i);
  const head = el("h2", {}, el("span", { class: `piece is-${one.verdict}` }, visible(one.piece)), ` ${one.verdict}`);
  const facts = [
    ["place", `${i} of ${tokens.length}`, "from 0"],
    ["id", one.id],
    ["cycle", one.cycle ?? "–"],
    ["turn", one.turn, one.written ? "that wrote it, from 0" : "before which it was read"],
    ["version", one.version ?? "–", "of the weights that produced it"],
    ["drafter", one.drafter ?? "–", "where the draft tested here came from"],
    ["log p, engine", digits(one.logprob)],
    ["log p, trainer", digits(one.trainer_logprob), "at the start of the update"],
    ["engine − trainer", small(one.difference)],
    ["overlap", small(one.overlap), "Σ min(p, q)"],
    ["entropy of p", `${small(one.target_entropy)} nats`],
    ["entropy of q", one.draft_entropy === null ? "–" : `${small(one.draft_entropy)} nats`],
  ];
  if (one.draft) facts.push(["p(draft)", small(one.draft.p)], ["q(draft)", small(one.draft.q)]);
  return [
    head,
    el("p", { class: "muted" }, `${VERDICTS[one.verdict]}.`, fate(one)),
    ...bars(one, tokens),
    el("dl", { class: "facts" }, facts.map(([name, value, title]) =>
      el("div", { title: title ?? null }, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: "buttons" }, button("Copy as JSON", () => copy({ ...about, ...one }, "token"), { title: "c" })),
  ];
}

const digits = (value) => (value === null ? "–" : value.toFixed(4));

/** How the draft was decided, in a sentence. */
function fate(one) {
  if (!one.draft) return null;
  const chance = one.draft.q > 0 && one.draft.p !== null ? small(Math.min(1, one.draft.p / one.draft.q)) : null;
  const odds = chance === null ? "." : `: min(1, p/q) was ${chance}.`;
  if (one.verdict === "accepted") return ` The draft was accepted${odds}`;
  return [" The draft ", el("del", { class: "rejected" }, visible(one.draft.piece)), ` was rejected${odds}`];
}

/** Bars of p and q over the likeliest tokens of both, the one emitted and the one drafted marked. */
function bars(one, tokens) {
  if (!one.p.length && !one.q.length) {
    const kept = "p and q of this completion were not kept: monitor.trace=sample keeps those of each step's first prompt.";
    const why = one.written ? kept : "The policy did not draw it: there is no p.";
    return [el("p", { class: "muted note" }, why)];
  }
  const all = union(one, tokens);
  const rows = all.filter((row) => row.emitted || row.drafted || row.p >= TINY || row.q >= TINY);
  const folded = all.length - rows.length;
  const tested = one.q.length > 0;
  const label = (row) => [
    row.emitted ? el("span", { class: "mark", title: "emitted" }, "●") : null,
    row.drafted ? el("span", { class: "mark", title: "drafted" }, "◇") : null,
    el("span", { class: "piece" }, visible(row.piece)),
  ];
  const table = el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token"), el("th", { scope: "col" }, "p, target"),
      el("th", { scope: "col" }, "q, draft"))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.emitted ? "emitted" : "" },
      el("th", { scope: "row", title: `id ${row.id}` }, label(row)), bar(row.p, "p"), bar(row.q, "q")))));
  const less = folded ? `${folded} more below ${TINY}. ` : "";
  const note = tested ? "● emitted, ◇ drafted; – is less than the likeliest, which were kept"
    : "● emitted; no draft was tested here, so there is no q";
  return [el("div", { class: "distributions" }, table), el("p", { class: "muted note" }, less + note)];
}

function bar(value, kind) {
  const fill = el("i", { class: `fill ${kind}` });
  fill.style.width = `${Math.max(value ?? 0, 0) * 100}%`;
  return el("td", {}, el("span", { class: "track" }, fill), el("span", { class: "value" }, small(value)));
}

/** Tokens of both lists, the likeliest first; the emitted and the drafted one are always among them. */
function union(one, tokens) {
  const rows = new Map();
  const row = (id) => {
    if (!rows.has(id)) rows.set(id, { id, piece: tokens.piece(id), p: null, q: null });
    return rows.get(id);
  };
  for (const { id, prob } of one.p) row(id).p = prob;
  for (const { id, prob } of one.q) row(id).q = prob;
  const emitted = row(one.id);
  emitted.emitted = true;
  emitted.p ??= Math.exp(one.logprob);
  if (one.draft) {
    const drafted = row(one.draft.id);
    drafted.drafted = true;
    drafted.p ??= one.draft.p;
    drafted.q ??= one.draft.q;
  }
  return [...rows.values()].sort((a, b) => (b.p ?? 0) - (a.p ?? 0) || (b.q ?? 0) - (a.q ?? 0));
}
