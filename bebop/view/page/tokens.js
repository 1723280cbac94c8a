// The tokens of a completion as text: coloured by what is asked for, one of them chosen, others found.

import { el, small, visible } from "./dom.js";

export const VERDICTS = {
  plain: "drawn where nothing was drafted",
  accepted: "a draft that stands",
  recovered: "drawn after a rejection",
  bonus: "drawn after all drafts of its cycle stand",
  unknown: "the engine does not say",
  untraced: "no trace was stored for this completion",
  observed: "read between two turns, not written by the policy",
};

/** What tokens can be coloured by: how strong a colour is (0 to 1, null: not known), and what its ends mean. */
export const MODES = {
  verdict: { label: "verdict" },
  overlap: { label: "overlap of p and q", column: "overlap", level: (v) => 1 - v, ends: ["1", "0"] },
  surprise: { label: "−log p", column: "logprobs", level: (v) => Math.min(1, -v / 5), ends: ["0", "5 nats"] },
  difference: { label: "engine − trainer", column: "difference", scaled: true },
  entropy: { label: "entropy of p", column: "target_entropy", scaled: true },
  version: { label: "version", column: "versions" },
};

/** What n and p look for. */
export const SOUGHT = {
  recovered: ["recovered", (t, i) => t.verdict(i) === "recovered"],
  accepted: ["accepted", (t, i) => t.verdict(i) === "accepted"],
  bonus: ["bonus", (t, i) => t.verdict(i) === "bonus"],
  low: ["overlap < 0.5", (t, i) => t.value("overlap", i) !== null && t.value("overlap", i) < 0.5],
  surprising: ["p < 0.1", (t, i) => t.value("logprobs", i) < Math.log(0.1)],
  different: ["|engine − trainer| > 0.01", (t, i) => Math.abs(t.value("difference", i) ?? 0) > 0.01],
  version: ["new version", (t, i) => t.newVersion(i) && i > 0],
  turn: ["next turn", (t, i) => i > 0 && t.turn(i) > Math.abs(t.turn(i - 1))],
};

/** One completion's tokens as the server sends them, with names in place of numbers. */
export class Tokens {
  constructor(found) {
    this.found = found;
    this.columns = found.tokens;
    const { logprobs, trainer_logprobs: trainer } = this.columns;
    this.columns.difference = trainer ? trainer.map((value, i) => (value === null ? null : logprobs[i] - value)) : null;
    this.length = this.columns.ids?.length ?? 0;
  }

  /** The value of a column at a place; null if it is not known. */
  value(column, i) {
    return this.columns[column]?.[i] ?? null;
  }

  /** The turn that wrote a token; -i: it was read before turn i. */
  turn(i) {
    return this.value("turns", i) ?? 0;
  }

  observed(i) {
    return this.turn(i) < 0;
  }

  /** Whether weights of another version begin to write here; what was read has none. */
  newVersion(i) {
    if (this.observed(i)) return false;
    let before = i - 1;
    while (before >= 0 && this.observed(before)) before -= 1;
    return before < 0 || this.value("versions", i) !== this.value("versions", before);
  }

  verdict(i) {
    if (this.observed(i)) return "observed";
    const number = this.value("verdicts", i);
    return number === null ? "untraced" : this.found.verdicts[number] ?? "unknown";
  }

  /** The text of a token id. */
  piece(id) {
    return this.found.pieces[id] ?? `[${id}]`;
  }

  text(i) {
    return this.piece(this.columns.ids[i]);
  }

  drafter(i) {
    const number = this.value("drafters", i);
    return number === null ? null : this.found.drafters[number] ?? null;
  }

  /** Everything known of a place, for people and for copying. */
  describe(i) {
    const draft = this.value("drafts", i);
    const top = (ids, probs) => (this.value(ids, i) ?? []).flatMap((id, k) =>
      (id < 0 ? [] : [{ id, piece: this.piece(id), prob: this.columns[probs][i][k] }]));
    return {
      place: i, turn: Math.abs(this.turn(i)), written: !this.observed(i), id: this.columns.ids[i],
      piece: this.text(i), verdict: this.verdict(i),
      cycle: this.value("cycles", i), version: this.value("versions", i), drafter: this.drafter(i),
      draft: draft === null ? null : {
        id: draft, piece: this.piece(draft), p: this.value("draft_target_probs", i), q: this.value("draft_probs", i),
      },
      overlap: this.value("overlap", i), target_entropy: this.value("target_entropy", i),
      draft_entropy: this.value("draft_entropy", i), logprob: this.value("logprobs", i),
      trainer_logprob: this.value("trainer_logprobs", i), difference: this.value("difference", i),
      p: top("target_ids", "target_top"), q: top("draft_ids", "draft_top"),
    };
  }

  /** The next place from `from` in direction `by` that `test` finds; null: none. */
  seek(test, from, by) {
    for (let i = from + by; i >= 0 && i < this.length; i += by) if (test(this, i)) return i;
    return null;
  }

  /** The largest size of a column, for colours. */
  most(column) {
    return (this.columns[column] ?? []).reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 0);
  }
}

/** The text of a completion; `choose(i)` is called when a token is clicked. */
export class TokenText {
  constructor(tokens, choose) {
    this.tokens = tokens;
    this.spans = [];
    this.element = el("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-label": "Tokens of the completion" });
    this.element.addEventListener("click", (event) => {
      const span = event.target.closest("[data-i]");
      if (span) choose(Number(span.dataset.i));
    });
    for (let i = 0; i < tokens.length; i += 1) this.element.append(...this.parts(i));
    this.colour("verdict");
  }

  parts(i) {
    const t = this.tokens;
    const parts = [];
    const began = i > 0 && t.value("cycles", i) !== null && t.value("cycles", i) !== t.value("cycles", i - 1);
    const version = t.value("versions", i);
    if (i > 0 && t.turn(i) !== t.turn(i - 1)) {
      const told = t.observed(i) ? "read, not written by the policy" : `turn ${t.turn(i)}`;
      parts.push(el("span", { class: `heading${t.observed(i) ? " read" : ""}` }, told));
    }
    if (t.newVersion(i)) {
      parts.push(el("span", { class: "version", title: `from here on weights of version ${version}` }, `v${version}`));
    }
    const draft = t.value("drafts", i);
    if (t.verdict(i) === "recovered" && draft !== null) {
      const title = `rejected draft of ${t.drafter(i) ?? "an unknown drafter"}`;
      parts.push(el("del", { class: "rejected", "data-i": i, title }, visible(t.piece(draft))));
    }
    const span = el("span", {
      class: `token is-${t.verdict(i)}${began ? " began" : ""}`, "data-i": i, role: "option", "aria-selected": "false",
      title: this.title(i),
    }, visible(t.text(i)));
    this.spans.push(span);
    return [...parts, span];
  }

  title(i) {
    const t = this.tokens;
    const drafter = t.drafter(i);
    const overlap = t.value("overlap", i);
    if (t.observed(i)) return `read before turn ${-t.turn(i)}: not written by the policy`;
    return [
      `${t.verdict(i)}${drafter ? `, draft of ${drafter}` : ""}`, `p ${small(Math.exp(t.value("logprobs", i)))}`,
      overlap === null ? null : `overlap ${small(overlap)}`, `version ${t.value("versions", i)}`,
    ].filter(Boolean).join(" · ");
  }

  /** Colour by a row of MODES. */
  colour(name) {
    const mode = MODES[name];
    this.element.dataset.mode = name;
    if (name === "verdict") return;
    const most = mode.scaled ? this.tokens.most(mode.column) || 1 : 1;
    const first = this.tokens.value("versions", 0);
    this.spans.forEach((span, i) => {
      const value = this.tokens.value(mode.column, i);
      const level = mode.scaled ? Math.abs(value ?? 0) / most : mode.level?.(value ?? 0) ?? 0;
      span.style.setProperty("--level", level.toFixed(3));
      span.classList.toggle("unmeasured", value === null);
      span.classList.toggle("below", name === "difference" && value < 0);
      span.dataset.hue = String((((value ?? 0) - first) % 4 + 4) % 4);
    });
  }

  /** Mark a place as chosen, and bring it into sight. */
  choose(i) {
    const before = this.element.querySelector(".chosen");
    before?.classList.remove("chosen");
    before?.setAttribute("aria-selected", "false");
    const span = this.spans[i];
    if (!span) return;
    span.classList.add("chosen");
    span.setAttribute("aria-selected", "true");
    span.scrollIntoView({ block: "nearest" });
  }
}
