// The page: which view an address means, what is polled, and what all views share.

import { alarmView } from "./alarm.js";
import { answerView } from "./answer.js";
import { get } from "./api.js";
import { compareView } from "./compare.js";
import { el } from "./dom.js";
import { startKeys } from "./keys.js";
import { overview } from "./overview.js";
import { link, route } from "./route.js";
import { tableView } from "./table.js";
import { startTheme } from "./theme.js";

const RUNNING = 2000;
const ENDED = 15000; // ms between two looks; an ended run may be resumed
const main = document.getElementById("main");
let runs = []; // as /api/runs lists them
let view = {}; // what is shown: keys, help, refresh(changed), leave()
let turn = 0; // of addresses: what an old one still loads is not shown

/** The view of an address. */
function chosen({ parts, query }) {
  const [kind, run, what, id] = parts;
  if (kind === undefined) return overview(runs);
  if (kind === "compare") return compareView(runs, parts.slice(1), query);
  const known = kind === "run" && runs[Number(run)] !== undefined;
  if (known && what === undefined) return tableView(runs, Number(run), query);
  if (known && what === "answer" && /^\d+$/.test(id)) return answerView(runs, Number(run), Number(id), query);
  if (known && what === "alarm" && /^\d+$/.test(id)) return alarmView(runs, Number(run), Number(id));
  throw new Error(`there is no page ${location.hash}`);
}

/** The names of the runs and what of them is shown, at the top. */
function showPath({ parts }) {
  const [kind, run, what, id] = parts;
  const crumbs = [];
  if (kind === "compare") crumbs.push(el("span", {}, "compare"));
  if (kind === "run" && runs[Number(run)]) {
    crumbs.push(el("a", { href: link(["run", run]), title: runs[Number(run)].path }, runs[Number(run)].name));
    if (what) crumbs.push(el("span", {}, `${what === "alarm" ? "alarm at step" : "completion"} ${id}`));
  }
  document.getElementById("path").replaceChildren(...crumbs);
  document.title = [...crumbs.map((crumb) => crumb.textContent), "Bebop viewer"].join(" · ");
}

async function show() {
  const mine = (turn += 1);
  const address = route();
  view.leave?.();
  view = {};
  showPath(address);
  try {
    const made = await chosen(address);
    if (mine !== turn) {
      made.leave?.();
      return;
    }
    view = made;
    main.replaceChildren(...[made.element].flat());
    made.shown?.();
  } catch (error) {
    if (mine === turn) main.replaceChildren(el("p", { class: "card problem", role: "alert" }, error.message));
    view = { keys: { Escape: back } };
  }
}

const back = () => (location.hash = link(route().parts.slice(0, -2)));

function showLive(problem = "") {
  const running = runs.filter((run) => run.state !== "ended").length;
  const place = document.getElementById("live");
  place.textContent = problem || (running ? `live: ${running} running` : "");
  place.className = problem ? "problem" : running ? "running" : "";
}

/** Look for news, again and again; a view takes in what changed in its own place. */
async function poll() {
  try {
    const { runs: now } = await get("state");
    const changed = now.map((state, i) => JSON.stringify(state) !== JSON.stringify(pick(runs[i], state)));
    now.forEach((state, i) => Object.assign(runs[i], state));
    showLive();
    if (changed.some(Boolean)) view.refresh?.(changed);
  } catch (error) {
    showLive(error.message);
  }
  setTimeout(poll, runs.some((run) => run.state !== "ended") ? RUNNING : ENDED);
}

const pick = (run, like) => Object.fromEntries(Object.keys(like).map((key) => [key, run[key]]));

async function start() {
  startTheme();
  startKeys(() => view);
  try {
    runs = (await get("runs")).runs;
  } catch (error) {
    main.replaceChildren(el("p", { class: "card problem", role: "alert" }, error.message));
    return;
  }
  window.addEventListener("hashchange", show);
  showLive();
  await show();
  setTimeout(poll, RUNNING);
}

start();
