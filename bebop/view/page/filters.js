// What a list of completions shows of each, and how it is sorted, filtered and searched.

import { button, choice, el, number } from "./dom.js";

/** A column: `name` as the server calls it (null: not sortable), and what is shown of a row. */
export const COLUMNS = [
  { name: "step", head: "step", show: (row) => row.step },
  {
    name: "prompt", head: "prompt", show: (row) => `${row.prompt}.${row.member}`,
    title: (row) => {
      const asked = row.question === null ? "" : `; question ${row.question}, epoch ${row.epoch}`;
      return `number of the prompt, and which of its completions${asked}`;
    },
  },
  { name: "task", head: "task", kind: "word", show: (row) => row.task, title: (row) => row.task },
  {
    name: "reward", head: "reward", show: (row) => number(row.reward),
    title: (row) => (row.timed_out ? "the reward function ran out of time" : null),
  },
  { name: "length", head: "length", show: (row) => row.length },
  {
    name: "staleness", head: "stale", show: (row) => row.staleness,
    title: () => "updates between the oldest token's weights and those it trains",
  },
  { name: "accept_length", head: "acc. len", show: (row) => number(row.accept_length), title: () => "tokens a cycle" },
  {
    name: "accept_rate", head: "acc. rate", show: (row) => number(row.accept_rate),
    title: () => "accepted drafts over tested ones",
  },
  { name: "overlap", head: "overlap", show: (row) => number(row.overlap), title: () => "mean of Σ min(p, q)" },
  { name: "system", head: "system", kind: "word", show: (row) => row.system, title: (row) => row.system },
  { name: "finish", head: "finish", kind: "word", show: (row) => row.finish },
  {
    name: "traced", head: "traced", show: (row) => (row.traced ? "yes" : "no"),
    title: () => "whether it is known how each token came about",
  },
  { name: null, head: "completion", kind: "text", show: (row) => row.excerpt.replace(/\s+/g, " ") },
];
const FIRST = "traced"; // what the server sorts by unless asked: see bebop/view/queries.py
const RANGES = [
  ["step", "step"], ["prompt", "prompt"], ["reward", "reward"], ["length", "length"], ["staleness", "staleness"],
  ["accept_length", "accept length"], ["accept_rate", "accept rate"], ["overlap", "overlap"],
  ["turns", "turns"], ["written", "written"], ["restarts", "restarts"], ["epoch", "epoch"], ["question", "question"],
];
const OF_TURNS = ["ended", "turns", "written", "restarts"];
const OF_EPOCHS = ["epoch", "question"];
const ANSWERED = "answered"; // the only ending without environments

/** The heads, which sort; `asked` is changed, then `changed` called. */
export function heads(asked, changed) {
  const row = el("div", { class: "heads", role: "row", "aria-rowindex": "1" });
  const draw = () => row.replaceChildren(...COLUMNS.map((column) => head(column, asked, () => {
    const now = (asked.sort ?? FIRST) === column.name ? asked.order ?? "desc" : null;
    asked.sort = column.name;
    asked.order = now === "desc" ? "asc" : "desc";
    draw();
    row.querySelector(`[data-sort="${column.name}"]`).focus();
    changed();
  })));
  draw();
  return row;
}

function head(column, asked, sort) {
  const own = column.name !== null && (asked.sort ?? FIRST) === column.name;
  const order = asked.order ?? "desc";
  const attributes = { role: "columnheader", class: column.kind ?? "", "aria-sort": own ? `${order}ending` : null };
  if (column.name === null) return el("div", attributes, column.head);
  const arrow = own ? (order === "desc" ? " ↓" : " ↑") : "";
  return el("div", attributes, button(column.head + arrow, sort, { class: "sort", "data-sort": column.name }));
}

/** Search and filters over a list; `asked` is changed, then `changed` called once typing pauses. */
export function filterBar(facets, asked, changed) {
  let waiting = 0;
  const set = (key, value, wait = 200) => {
    if (value === "") delete asked[key];
    else asked[key] = value;
    clearTimeout(waiting);
    waiting = setTimeout(changed, wait);
    mark();
  };
  const search = el("input", {
    type: "search", placeholder: "Search prompts and completions", "aria-label": "Search prompts and completions",
    value: asked.q ?? "",
  });
  search.addEventListener("input", () => set("q", search.value));
  const several = Object.keys(facets.words.ended ?? {}).some((ending) => ending !== ANSWERED);
  const again = facets.ranges.epoch?.[1] > 0;
  const shown = (name) => (several || !OF_TURNS.includes(name)) && (again || !OF_EPOCHS.includes(name));
  const chosenFrom = Object.entries(facets.words).filter(([name]) => shown(name));
  const words = chosenFrom.map(([name, values]) => {
    const options = [["", "all"], ...Object.entries(values).map(([value, count]) => [value, `${value} (${count})`])];
    return choice(name, options, asked[name] ?? "", (value) => set(name, value, 0));
  });
  const chosen = asked.min_traced === "1" ? "1" : asked.max_traced === "0" ? "0" : "";
  words.push(choice("traced", [["", "all"], ["1", "yes"], ["0", "no"]], chosen, (value) => {
    set("min_traced", value === "1" ? "1" : "", 0);
    set("max_traced", value === "0" ? "0" : "", 0);
  }));
  const ranges = RANGES.filter(([name]) => shown(name)).map(([name, label]) =>
    range(name, label, facets.ranges[name], asked, set));
  const clear = button("Clear", () => {
    for (const key of Object.keys(asked)) if (key !== "sort" && key !== "order") delete asked[key];
    for (const field of panel.querySelectorAll("input, select")) field.value = "";
    search.value = "";
    mark();
    changed();
  }, { class: "quiet" });
  const panel = el("div", { class: "filters", id: "filters", hidden: true }, words, ranges, clear);
  const toggle = button("Filters", () => {
    panel.hidden = !panel.hidden;
    toggle.setAttribute("aria-expanded", String(!panel.hidden));
  }, { "aria-expanded": "false", "aria-controls": "filters" });
  function mark() {
    const count = Object.keys(asked).filter((key) => !["sort", "order", "q"].includes(key)).length;
    toggle.textContent = count ? `Filters (${count})` : "Filters";
  }
  mark();
  return { element: el("div", { class: "bar" }, search, toggle, panel), search };
}

function range(name, label, [least, most] = [null, null], asked, set) {
  const field = (end, hint) => {
    const key = `${end}_${name}`;
    const input = el("input", {
      type: "number", step: "any", placeholder: hint === null ? "" : String(Math.round(hint * 100) / 100),
      "aria-label": `${label}, ${end === "min" ? "at least" : "at most"}`, value: asked[key] ?? "",
    });
    input.addEventListener("input", () => set(key, input.value));
    return input;
  };
  return el("div", { class: "field range", role: "group", "aria-label": label },
    el("span", {}, label), field("min", least), "to", field("max", most));
}
