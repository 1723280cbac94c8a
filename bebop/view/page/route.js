// Addresses: `#/run/0/answer/12?token=3` and back. All that is shown can be linked to.

/** The parts and the query of the page's hash. */
export function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/** A hash of parts and a query; null and "" are left out. */
export function link(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return `#/${parts.map(encodeURIComponent).join("/").replaceAll("%3A", ":")}${search}`;
}

/** Change the query of the present address, without a step in the history. */
export function remember(changes) {
  const { parts, query } = route();
  const next = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", link(parts, next));
}
