// The keyboard: each view has keys of its own, the page has a few for all of them.

import { button, el } from "./dom.js";
import { switchTheme } from "./theme.js";

const EVERYWHERE = [["?", "this list"], ["d", "dark or light"], ["Esc", "back, or close"], ["/", "search the completions"]];

/** What is written for a key. */
const NAMES = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc", " ": "space" };

/** A dialog with the keys of a view: [[keys, what they do]]. */
export function showKeys(own) {
  if (document.querySelector("dialog[open]")) return;
  const rows = [...own, ...EVERYWHERE].map(([keys, what]) => {
    const caps = keys.split(" ").map((key) => el("kbd", {}, NAMES[key] ?? key));
    return el("tr", {}, el("td", {}, caps), el("td", {}, what));
  });
  const close = button("Close", () => dialog.close());
  const table = el("table", {}, el("tbody", {}, rows));
  const dialog = el("dialog", { "aria-label": "Keyboard" }, el("h2", {}, "Keyboard"), table, close);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Send keys to `view()`, which has `keys`: name -> action, and `help`: rows for the list. */
export function startKeys(view) {
  document.getElementById("help").addEventListener("click", () => showKeys(view().help ?? []));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest?.("input, select, textarea");
    if (typing && event.key !== "Escape") return;
    if (typing) {
      event.target.blur();
      return;
    }
    // Enter and space press the button or follow the link that has the focus.
    const pressing = event.key === "Enter" || event.key === " ";
    if (pressing && event.target.closest?.("button, a, summary")) return;
    const action = view().keys?.[event.key] ?? { d: switchTheme, "?": () => showKeys(view().help ?? []) }[event.key];
    if (!action) return;
    event.preventDefault();
    action(event);
  });
}
