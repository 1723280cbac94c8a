// Elements out of data. Text goes in as text nodes alone: nothing that a run holds is ever read as HTML.

/**
 * An element. Attributes by name; `on...` are listeners, true is an attribute without a value, null and false leave it
 * out. Children are elements or text; null is left out.
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return made;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

/** A button that is read out by its label. */
export function button(label, action, attributes = {}) {
  return el("button", { type: "button", onclick: action, ...attributes }, label);
}

/** A list to choose from; `options`: pairs of value and label. */
export function choice(label, options, chosen, action) {
  const items = options.map(([value, text]) => el("option", { value, selected: value === chosen }, text));
  const select = el("select", { "aria-label": label, onchange: () => action(select.value) }, items);
  return el("label", { class: "field" }, el("span", {}, label), select);
}

/** A number as a reader wants it: a dash for null. */
export function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) && digits === 0 ? String(value) : value.toFixed(digits);
}

/** A probability or a difference, also a tiny one. */
export function small(value) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

let fading = 0;

/** A word at the edge of the page, for two seconds. */
export function toast(text) {
  const place = document.getElementById("toast");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(fading);
  fading = setTimeout(() => place.classList.remove("shown"), 2000);
}

/** To the clipboard, as indented JSON. */
export async function copy(value, what) {
  const text = JSON.stringify(value, null, 1);
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied as JSON`);
  } catch {
    toast("the browser does not let this page write to the clipboard");
  }
}

/** A piece of text whose blanks can be seen; its textContent stays what it is. */
export function visible(text) {
  if (text === "") return [el("span", { class: "blank empty" })];
  return text.split(/([ \n\t\r]|\u00a0)/).filter((part) => part !== "").map((part) => {
    const kind = { " ": "space", "\n": "newline", "\t": "tab", "\r": "return", "\u00a0": "nbsp" }[part];
    return kind ? el("span", { class: `blank ${kind}` }, part) : document.createTextNode(part);
  });
}
