// The list of a run's completions: sorted, filtered and searched by the server, of which only the rows in sight are asked
// for and drawn, so that any number of completions opens at once.

import { get } from "./api.js";
import { el, toast } from "./dom.js";
import { COLUMNS, filterBar, heads } from "./filters.js";
import { link, remember } from "./route.js";

const PAGE = 100; // rows asked for at once
const SPARE = 8; // rows drawn beyond the edges
const places = new Map(); // run -> {scroll, selected} to come back to

/** The view of run number `run`; `query`: sort, order, q and filters, see bebop/view/queries.py. */
export async function tableView(runs, run, query) {
  const asked = Object.fromEntries(query);
  const searching = asked.find !== undefined;
  delete asked.find;
  if (searching) remember({ find: null });
  const list = new List(run, asked);
  const facets = await get(`runs/${run}/facets`);
  const bar = filterBar(facets, asked, () => list.restart());
  const count = el("p", { class: "muted count", role: "status" });
  list.onTotal = (total) => (count.textContent = countText(total, runs[run]));
  await list.first();
  const move = (by) => () => list.move(by);
  return {
    element: [el("div", { class: "tools" }, bar.element, count), list.element],
    shown: () => {
      list.comeBack();
      if (searching) bar.search.focus();
    },
    refresh: (changed) => changed[run] && list.refresh(),
    leave: () => list.leave(),
    keys: {
      j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1), PageDown: move(15), PageUp: move(-15),
      Home: move(-Infinity), End: move(Infinity), Enter: () => list.open(), "/": () => bar.search.focus(),
      Escape: () => (location.hash = "#/"),
    },
    help: [["j k ArrowDown ArrowUp", "next and previous completion"], ["PageDown PageUp Home End", "further"],
      ["Enter", "open the completion"]],
  };
}

function countText(total, run) {
  if (run.state === "waiting") return "waiting for the first step of the job";
  const [found, all] = [total, run.answers].map((count) => count.toLocaleString("en"));
  return found === all ? `${all} completions` : `${found} of ${all} completions`;
}

class List {
  constructor(run, asked) {
    this.run = run;
    this.asked = asked; // changed by the bar and the heads
    this.pages = new Map(); // page -> rows
    this.total = 0;
    this.selected = null; // {id, place}
    this.known = Object.keys(asked); // what the address holds
    this.round = 0; // a change of what is asked for makes older replies void
    this.rows = el("div", { class: "rows", role: "rowgroup" });
    this.heads = heads(asked, () => this.restart());
    const named = { class: "list", role: "grid", "aria-label": "Completions", tabindex: "0" };
    this.element = el("div", named, this.heads, this.rows);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-place]");
      if (row) this.select(Number(row.dataset.place));
    });
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.element);
  }

  get height() {
    this.measured ??= parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")) || 34;
    return this.measured;
  }

  leave() {
    this.resize.disconnect();
    const asked = JSON.stringify(this.asked);
    places.set(this.run, { scroll: this.element.scrollTop, selected: this.selected, asked });
  }

  /** Scroll to where the reader was before opening a completion of the same list. */
  comeBack() {
    const kept = places.get(this.run);
    if (kept?.asked === JSON.stringify(this.asked)) {
      this.selected = kept.selected;
      this.element.scrollTop = kept.scroll;
    }
    this.draw();
  }

  async first() {
    this.take(await this.ask(0));
  }

  ask(page, extra = {}) {
    return get(`runs/${this.run}/answers`, { ...this.asked, offset: page * PAGE, limit: PAGE, ...extra });
  }

  take(found) {
    this.total = found.total;
    this.pages.set(found.offset / PAGE, found.rows);
    this.element.setAttribute("aria-rowcount", this.total + 1);
    this.rows.style.height = `${this.total * this.height}px`;
    this.onTotal?.(this.total);
  }

  /** Another order or another filter: from the top. */
  async restart() {
    const round = (this.round += 1);
    remember({ ...Object.fromEntries(this.known.map((key) => [key, null])), ...this.asked });
    this.known = Object.keys(this.asked);
    let found;
    try {
      found = await this.ask(0);
    } catch (error) {
      toast(error.message);
      return;
    }
    if (round !== this.round) return;
    this.pages.clear();
    this.selected = null;
    this.element.scrollTop = 0;
    this.take(found);
    this.draw();
  }

  /** New completions came: the rows in sight stay where they are, whatever was put before them. */
  async refresh() {
    const round = this.round;
    const top = Math.floor(this.element.scrollTop / this.height);
    const scrolled = this.element.scrollTop > 0;
    const held = scrolled ? { id: this.row(top)?.id, place: top } : this.selected;
    const found = await this.ask(Math.floor(top / PAGE), held?.id === undefined ? {} : { anchor: held.id });
    const moved = typeof found.place === "number" ? found.place - held.place : 0;
    const first = scrolled ? top + moved : 0;
    const pages = [found];
    // What is in sight is there before the old rows go, so that nothing flickers.
    for (let page = Math.floor(first / PAGE); page * PAGE < Math.min(found.total, first + this.sight); page += 1) {
      if (page * PAGE !== found.offset) pages.push(await this.ask(page));
    }
    if (round !== this.round) return;
    if (this.selected) this.selected.place += moved;
    this.pages.clear();
    pages.forEach((page) => this.take(page));
    if (scrolled) this.element.scrollTop += moved * this.height;
    this.draw();
  }

  /** Rows that have room at once. */
  get sight() {
    return Math.ceil(this.element.clientHeight / this.height);
  }

  row(place) {
    return this.pages.get(Math.floor(place / PAGE))?.[place % PAGE];
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.height) - SPARE);
    const end = Math.min(this.total, first + this.sight + 2 * SPARE);
    const drawn = [];
    for (let place = first; place < end; place += 1) drawn.push(this.drawRow(place));
    this.rows.replaceChildren(...drawn);
    this.fetchMissing(Math.floor(first / PAGE), Math.floor(Math.max(first, end - 1) / PAGE));
  }

  async fetchMissing(from, to) {
    const round = this.round;
    for (let page = from; page <= to; page += 1) {
      if (this.pages.has(page) || page * PAGE >= this.total) continue;
      this.pages.set(page, []); // on its way
      try {
        const found = await this.ask(page);
        if (round !== this.round) return;
        this.take(found);
        this.draw();
      } catch {
        this.pages.delete(page); // asked for again when it is in sight again
      }
    }
  }

  drawRow(place) {
    const row = this.row(place);
    const chosen = this.selected?.place === place;
    const made = el("div", {
      class: `row${chosen ? " chosen" : ""}`, role: "row", "data-place": place, "aria-rowindex": place + 2,
      "aria-selected": String(chosen),
    });
    made.style.top = `${place * this.height}px`;
    if (!row) return made;
    made.dataset.id = row.id;
    made.append(...COLUMNS.map((column, i) => {
      const text = column.show(row);
      const inner = i === 0 ? this.anchor(row, text) : text;
      return el("div", { role: "gridcell", class: column.kind ?? "", title: column.title?.(row) }, inner);
    }));
    return made;
  }

  anchor(row, text) {
    const href = link(["run", this.run, "answer", row.id]);
    return el("a", { href, tabindex: "-1", "aria-label": `completion ${row.id}, step ${row.step}` }, text);
  }

  select(place) {
    const row = this.row(place);
    this.selected = { id: row?.id, place };
    if (row) location.hash = link(["run", this.run, "answer", row.id]);
  }

  move(by) {
    const from = this.selected?.place ?? -1;
    const place = Math.max(0, Math.min(this.total - 1, by === Infinity ? this.total - 1 : from + by));
    if (!this.total) return;
    this.selected = { id: this.row(place)?.id, place };
    const top = place * this.height;
    const room = this.element.clientHeight - this.heads.offsetHeight - this.height;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top > this.element.scrollTop + room) this.element.scrollTop = top - room;
    this.draw();
  }

  open() {
    if (this.selected) this.select(this.selected.place);
  }
}
