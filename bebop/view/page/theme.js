// Dark and light: as the system says, until the button says otherwise, which is remembered.

const KEY = "bebop.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

/** "dark" or "light", whichever is shown. */
export const shown = () => document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");

function changed() {
  document.getElementById("theme").textContent = shown() === "dark" ? "Light" : "Dark";
  window.dispatchEvent(new Event("themechange"));
}

/** Show the other one. */
export function switchTheme() {
  const next = shown() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(KEY, next);
  } catch { /* a browser that keeps nothing: the choice holds for this page */ }
  changed();
}

/** Show what was chosen last time. */
export function startTheme() {
  try {
    const kept = localStorage.getItem(KEY);
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch { /* as above */ }
  system.addEventListener("change", changed);
  document.getElementById("theme").addEventListener("click", switchTheme);
  changed();
}

/** What a colour of the style sheet is at the moment, for plots. */
export function color(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
