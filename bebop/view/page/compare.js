// Two completions of one prompt side by side, from the first token that differs.

import { turns } from "./answer.js";
import { get } from "./api.js";
import { button, el, number } from "./dom.js";
import { tokenPanel } from "./panel.js";
import { link } from "./route.js";
import { Tokens, TokenText } from "./tokens.js";

/** The view of `picked`: one or two of "run:answer"; with one, the other is to be chosen. */
export async function compareView(runs, picked) {
  const chosen = picked.slice(0, 2).map((text) => {
    const found = /^(\d+):(\d+)$/.exec(text);
    if (!found || !runs[Number(found[1])]) throw new Error(`there is no completion ${text}`);
    return { run: Number(found[1]), id: Number(found[2]) };
  });
  if (!chosen.length) throw new Error("choose a completion first, then compare it");
  const [sides, siblings] = await Promise.all([
    Promise.all(chosen.map(({ run, id }) => get(`runs/${run}/answers/${id}`))),
    get(`runs/${chosen[0].run}/answers/${chosen[0].id}/siblings`),
  ]);
  const all = sides.map((found) => new Tokens(found));
  const first = all.length === 2 ? firstDifference(all[0], all[1]) : null;
  const panels = all.map(() => el("div", { class: "card side under", "aria-live": "polite" }));
  const state = { at: null };
  const choose = (i) => {
    state.at = Math.max(0, Math.min(Math.max(...all.map((one) => one.length)) - 1, i));
    texts.forEach((text, side) => {
      const there = state.at < all[side].length;
      text.choose(there ? state.at : -1);
      const about = { run: runs[chosen[side].run].name, answer: chosen[side].id };
      const told = there ? tokenPanel(all[side], state.at, about) : ["It ended before this place."];
      panels[side].replaceChildren(...told);
    });
  };
  const texts = all.map((tokens) => new TokenText(tokens, choose));
  if (first !== null) texts.forEach((text) => markDifference(text, first));
  const columns = sides.map((found, side) => column(runs, chosen[side], found, texts[side]));
  const move = (by) => () => choose(state.at === null ? first ?? 0 : state.at + by);
  const jump = () => first !== null && choose(first);
  return {
    element: [
      picker(runs, chosen, siblings),
      el("p", { class: "card" }, sides.length === 2 ? verdict(all, first, jump) : "Choose the other one in the list."),
      el("div", { class: "pair" }, columns),
      el("div", { class: "pair" }, panels),
    ],
    shown: jump,
    keys: {
      j: move(1), ArrowRight: move(1), ArrowDown: move(1), k: move(-1), ArrowLeft: move(-1), ArrowUp: move(-1), n: jump,
      Escape: () => (location.hash = link(["run", chosen[0].run, "answer", chosen[0].id])),
    },
    help: [["j k ArrowLeft ArrowRight", "next and previous place in both"], ["n", "the first token that differs"]],
  };
}

/** The first place at which two completions differ, also by one having ended; null: they are equal. */
export function firstDifference(a, b) {
  const shorter = Math.min(a.length, b.length);
  for (let i = 0; i < shorter; i += 1) if (a.columns.ids[i] !== b.columns.ids[i]) return i;
  return a.length === b.length ? null : shorter;
}

function verdict(all, first, jump) {
  if (first === null) return [`The two are equal in all of their ${all[0].length} tokens.`];
  const same = first === 0 ? "They differ from the first token on. " : `The first ${first} tokens are equal. `;
  return [same, button(`First difference: token ${first}`, jump, { title: "n" })];
}

function markDifference(text, first) {
  text.spans.forEach((span, i) => span.classList.toggle("same", i < first));
  text.spans[first]?.classList.add("differs");
  text.spans[first]?.before(el("span", { class: "version fork", title: "the first token that differs" }, "≠"));
}

function column(runs, { run, id }, found, text) {
  const { answer } = found;
  const line = [
    `step ${answer.step}`, `version ${answer.version_last}`, `reward ${number(answer.reward)}`, answer.system,
    `${answer.length} tokens`, `accept length ${number(answer.accept_length)}`,
  ].join(" · ");
  const body = { ...found, gold: null, turns: found.turns.filter((turn) => turn.role !== "prompt") };
  return el("section", { class: "column", "aria-label": `completion ${id} of ${runs[run].name}` },
    el("h2", {}, el("a", { href: link(["run", run, "answer", id]) }, `${runs[run].name} · completion ${id}`)),
    el("p", { class: "muted" }, line), turns(body, text));
}

/** The prompt, and every completion of it; two of them are chosen. */
function picker(runs, chosen, siblings) {
  const at = (row, side) => chosen[side]?.run === row.run && chosen[side]?.id === row.id;
  const pick = (row, side) => {
    const next = [...chosen];
    next[side] = { run: row.run, id: row.id };
    return link(["compare", ...next.map(({ run, id }) => `${run}:${id}`)]);
  };
  const rows = siblings.answers.map((row) => el("tr", {},
    el("td", {}, ["left", "right"].map((name, side) => el("a", {
      class: `button pick${at(row, side) ? " on" : ""}`, href: pick(row, side),
      "aria-current": at(row, side) ? "true" : null, "aria-label": `${name}: completion ${row.id} of ${runs[row.run].name}`,
    }, name))),
    ...[runs[row.run].name, row.id, row.step, row.version_last, number(row.reward), row.system, row.length,
      number(row.accept_length)].map((value) => el("td", {}, value)),
    el("td", { class: "text" }, row.same_text ? row.excerpt : "another text under this number")));
  const heads = ["show", "run", "completion", "step", "version", "reward", "system", "tokens", "acc. len", "text"];
  return el("details", { class: "card picker", open: chosen.length < 2 },
    el("summary", {}, `Prompt ${siblings.prompt}: ${siblings.answers.length} completions`),
    el("div", { class: "plaintext" }, siblings.text),
    siblings.gold === null ? null : el("p", { class: "gold" }, el("b", {}, "gold answer "), siblings.gold),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows))));
}
