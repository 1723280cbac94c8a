// What the page asks the server for.

/** JSON of an address; an Error with the server's own line if it refuses. */
export async function get(path, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  let answer;
  try {
    answer = await fetch(`/api/${path}${search}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the viewer's server does not answer: was it stopped?");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`);
  return body;
}

let plotly = null;

/** plotly.js, loaded when the first plot is drawn. */
export function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("plotly.js did not load"));
    document.head.append(script);
  });
  return plotly;
}
