// One completion token by token, with the token chosen beside it.

import { get } from "./api.js";
import { button, choice, copy, el, number } from "./dom.js";
import { tokenPanel } from "./panel.js";
import { link, remember } from "./route.js";
import { MODES, SOUGHT, Tokens, TokenText, VERDICTS } from "./tokens.js";

/** The view of completion `id` of run number `run`; `query`: token, mode. */
export async function answerView(runs, run, id, query) {
  const found = await get(`runs/${run}/answers/${id}`);
  const tokens = new Tokens(found);
  const about = { run: runs[run].name, answer: id };
  const state = { at: null, sought: "recovered" };
  const hint = tokens.length ? "Choose a token: click on it, or use the arrow keys." : "No tokens are stored.";
  const side = el("aside", { class: "card side", "aria-label": "The chosen token", "aria-live": "polite" },
    el("p", { class: "muted" }, hint));
  const text = new TokenText(tokens, (i) => choose(i));

  function choose(i) {
    if (!tokens.length) return;
    state.at = Math.max(0, Math.min(tokens.length - 1, i));
    side.replaceChildren(...tokenPanel(tokens, state.at, about));
    text.choose(state.at); // after the panel, which takes room on a narrow screen
    remember({ token: state.at });
  }
  const move = (by) => () => choose(state.at === null ? 0 : state.at + by);
  const seek = (by) => () => {
    const next = tokens.seek(SOUGHT[state.sought][1], state.at ?? -1, by);
    if (next !== null) choose(next);
  };
  const copyToken = () => state.at !== null && copy({ ...about, ...tokens.describe(state.at) }, "token");
  const copyAnswer = () =>
    copy({ ...about, ...found.answer, gold: found.gold, turns: found.turns, tokens: all(tokens) }, "completion");
  const asked = query.get("token");
  const mode = query.get("mode") in MODES ? query.get("mode") : "verdict";
  return {
    element: [
      summary(found.answer, run, id, copyAnswer),
      ...(found.answer.traced ? [] : [untraced(run)]),
      el("div", { class: "reading" },
        el("div", { class: "column" }, toolbar(text, tokens, state, mode, seek), turns(found, text)), side),
    ],
    shown: () => asked !== null && /^\d+$/.test(asked) && choose(Number(asked)),
    keys: {
      ArrowRight: move(1), ArrowDown: move(1), j: move(1), ArrowLeft: move(-1), ArrowUp: move(-1), k: move(-1),
      Home: () => choose(0), End: () => choose(tokens.length - 1), n: seek(1), p: seek(-1),
      c: copyToken, C: copyAnswer, Escape: () => (location.hash = link(["run", run])),
      "/": () => (location.hash = link(["run", run], { find: 1 })), m: () => (location.hash = compareLink(run, id)),
    },
    help: [["j k ArrowLeft ArrowRight", "next and previous token"], ["Home End", "first and last token"],
      ["n p", "next and previous of what is looked for (recovered tokens)"],
      ["c C", "copy the token, the completion, as JSON"], ["m", "compare with other completions of the prompt"]],
  };
}

const all = (tokens) => Array.from({ length: tokens.length }, (_, i) => tokens.describe(i));
const compareLink = (run, id) => link(["compare", `${run}:${id}`]);

/** What is known of the completion as a whole, and what can be done with it. */
function summary(row, run, id, copyAnswer) {
  const one = row.version_first === row.version_last;
  const versions = one ? row.version_last : `${row.version_first} to ${row.version_last}`;
  const facts = [
    ["step", row.step], ["prompt", `${row.prompt}.${row.member}`], ["task", row.task], ["system", row.system],
    ["reward", number(row.reward)], ["tokens", row.length], ["finish", row.finish], ["versions", versions],
    ["staleness", row.staleness], ["accept length", number(row.accept_length)],
    ["accept rate", number(row.accept_rate)], ["overlap", number(row.overlap)], ["exact", row.exact ? "yes" : "no"],
  ];
  for (const [name, part] of Object.entries(row.parts)) {
    facts.push([`reward: ${name}`, part === null ? "does not apply" : number(part)]);
  }
  if (row.question !== null) facts.push(["question", row.question], ["epoch", row.epoch]);
  if (row.turns > 1) facts.push(["turns", row.turns], ["written", `${row.written} tokens`]);
  if (row.ended !== "answered") facts.push(["ended", row.ended], ["restarts", row.restarts]);
  if (row.timed_out) facts.push(["reward function", "ran out of time"]);
  return el("section", { class: "card summary", "aria-label": "The completion" },
    factList(facts),
    el("p", { class: "buttons" }, el("a", { class: "button", href: compareLink(run, id) }, "Compare"),
      button("Copy completion as JSON", copyAnswer, { title: "C" })));
}

/** What a completion lacks of which only the text was kept, and where others are. */
function untraced(run) {
  const why = "Not traced: how its tokens came about was not kept (monitor.trace=sample keeps it of the first prompt "
    + "of each step, monitor.trace=all of every completion). ";
  const href = link(["run", run], { min_traced: 1 });
  return el("p", { class: "card untraced" }, why, el("a", { href }, "Traced completions"));
}

/** Names and values in a row. */
export const factList = (facts) => el("dl", { class: "facts wide" },
  facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

/** Prompt, completion and whatever turns there are, and what would have been right. */
export function turns(found, text) {
  const gold = found.gold === null ? [] : [{ role: "gold answer", text: found.gold }];
  return [...found.turns, ...gold].map((turn) =>
    el("section", { class: `turn ${turn.role.split(" ")[0]}`, "aria-label": turn.role },
      el("h3", {}, turn.role),
      turn.tokens && turn.tokens[1] > turn.tokens[0] ? text.element : el("div", { class: "plaintext" }, turn.text)));
}

/** Colours, their legend, what n and p find. */
function toolbar(text, tokens, state, mode, seek) {
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Legend" });
  const colours = (name) => {
    text.colour(name);
    legend.replaceChildren(...legendOf(name, text, tokens));
  };
  colours(mode);
  const options = Object.entries(MODES).map(([name, { label }]) => [name, label]);
  const sought = Object.entries(SOUGHT).map(([name, [label]]) => [name, label]);
  const colour = choice("colour", options, mode, (name) => {
    colours(name);
    remember({ mode: name === "verdict" ? null : name });
  });
  const find = choice("find", sought, state.sought, (name) => (state.sought = name));
  return el("div", { class: "tools token-tools" }, colour, legend,
    el("div", { class: "field" }, find, button("‹", seek(-1), { "aria-label": "previous (p)", title: "p" }),
      button("›", seek(1), { "aria-label": "next (n)", title: "n" })));
}

function legendOf(name, text, tokens) {
  const own = name === "verdict" ? verdictKeys(text, tokens) : [scale(name, tokens)];
  return [...own, key("rejected drafts", "rejected", text), key("cycles", "cycles", text)];
}

/** A key for each verdict that occurs; it shows and hides the colour. */
function verdictKeys(text, tokens) {
  const counts = {};
  for (let i = 0; i < tokens.length; i += 1) counts[tokens.verdict(i)] = (counts[tokens.verdict(i)] ?? 0) + 1;
  return Object.keys(VERDICTS).filter((name) => counts[name]).map((name) =>
    key(`${name} ${counts[name]}`, name, text, VERDICTS[name]));
}

function key(label, name, text, title = null) {
  const hidden = `hide-${name}`;
  const letters = name === "rejected" ? el("del", {}, "ab") : "ab";
  const swatch = el("i", { class: `sample token is-${name}`, "aria-hidden": "true" }, letters);
  const made = button([swatch, ` ${label}`], () => {
    const off = text.element.classList.toggle(hidden);
    made.setAttribute("aria-pressed", String(!off));
  }, { class: "key", "aria-pressed": String(!text.element.classList.contains(hidden)), title });
  return made;
}

/** What the ends of the colours mean. */
function scale(name, tokens) {
  const mode = MODES[name];
  if (tokens.columns[mode.column] === null || tokens.columns[mode.column] === undefined) {
    return el("span", { class: "muted" }, "not stored of this completion");
  }
  if (name === "version") return el("span", { class: "muted" }, "a colour a version");
  const most = tokens.most(mode.column);
  const end = `${most.toPrecision(2)} nats`;
  const ends = mode.ends ?? (name === "difference" ? [`−${most.toPrecision(2)}`, `+${end}`] : ["0", end]);
  const kind = name === "difference" ? "ramp two" : "ramp";
  return el("span", { class: "scale" }, ends[0], el("i", { class: kind, "aria-hidden": "true" }), ends[1]);
}
