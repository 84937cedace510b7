// The load of workers: the values of the last entries, and their charts, which grow with the events of the master.
import { on, refresh, root } from "./app.js";
import { bytes, chart } from "./charts.js";

const RECENT_S = 300;
const MOST_POINTS = { small: 200, large: 1000 };
const AT_ONCE = 4;
const COLORS = { cpu: "--c1", memory: "--c2", gpu: "--c3", gpu_memory: "--c4", network_in: "--c6", network_out: "--c5" };
const METRICS = Object.keys(COLORS);
const figures = new Map(); // "worker metric" -> {element, xs, ys, chart}
let isRecent = true;
let start = 0;
let size = "small";

function write(metric, value) {
  if (metric === "cpu" || metric === "gpu") return value === null ? "-" : `${Math.round(value)} %`;
  return bytes(value) + (metric.startsWith("network") && value !== null ? "/s" : "");
}

/** Find the figures of the page and forget those that are gone; return the workers of new ones. */
function attach() {
  for (const [key, figure] of figures) {
    if (figure.element.isConnected) continue;
    figure.chart?.remove();
    figures.delete(key);
  }
  const fresh = new Set();
  for (const element of document.querySelectorAll(".load[data-metric]")) {
    const { worker, metric } = element.dataset;
    if (figures.has(`${worker} ${metric}`)) continue;
    figures.set(`${worker} ${metric}`, { element, xs: [], ys: [], chart: null });
    fresh.add(worker);
  }
  return fresh;
}

function show(figure) {
  const { element, xs, ys } = figure;
  const { metric } = element.dataset;
  if (!xs.length) return;
  element.querySelector(".value").textContent = write(metric, ys[ys.length - 1]);
  const columns = [xs.slice(), ys.slice()];
  if (figure.chart) {
    figure.chart.set(columns);
    return;
  }
  const options = {
    series: [{ label: element.querySelector("dt").firstChild.textContent.trim(), color: COLORS[metric] }],
    format: (value) => write(metric, value),
    sparkline: size === "small",
    isTime: true,
    height: size === "small" ? 40 : 200,
    min: 0,
    max: metric === "gpu" ? 100 : metric === "cpu" ? 10 : 1,
  };
  figure.chart = chart(element.querySelector(".chart"), options, columns);
}

function add(figure, x, value) {
  const y = value === null || value === "" ? NaN : Number(value);
  if (!Number.isFinite(y) || x <= (figure.xs[figure.xs.length - 1] ?? -Infinity)) return;
  figure.xs.push(x);
  figure.ys.push(y);
  const from = isRecent ? figure.xs.findIndex((old) => old > x - RECENT_S) : figure.xs.length - 2 * MOST_POINTS[size];
  if (from > 0) {
    figure.xs.splice(0, from);
    figure.ys.splice(0, from);
  }
}

async function read(worker) {
  let found = [];
  if (isRecent) {
    const since = new Date(Date.now() - RECENT_S * 1000).toISOString();
    const answer = await fetch(`${root}/api/metrics/${worker}/?since=${since}&last_n=${MOST_POINTS.large}`);
    const entries = answer.ok ? Object.entries(await answer.json()) : [];
    found = entries.map(([name, list]) => [name, list.map((entry) => [Date.parse(entry.date) / 1000, entry.value])]);
  } else {
    const names = METRICS.map((name) => `metric=${name}`).join("&");
    const answer = await fetch(`${root}/api/pods/${worker}/curves/?${names}&points=${MOST_POINTS[size]}`);
    const { curves } = answer.ok ? await answer.json() : { curves: [] };
    found = curves.map(({ name, time_s, value }) => [name, time_s.map((time, index) => [start + time, value[index]])]);
  }
  for (const [name, points] of found) {
    const figure = figures.get(`${worker} ${name}`);
    if (!figure) continue;
    figure.xs = [];
    figure.ys = [];
    for (const [x, value] of points) add(figure, x, value);
    show(figure);
  }
}

async function readAll(workers) {
  const left = [...workers];
  const work = async () => {
    // The master may be away; the page reads again when it is back.
    while (left.length) await read(left.shift()).catch(() => {});
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
}

/**
 * Keep the figures of the page current.
 *
 * @param {object} options - from: the charts show the whole run, whose time 0 this is, in seconds since 1970; by default
 *   they show the last minutes. isLarge: they have axes.
 */
export function follow({ from, isLarge = false } = {}) {
  isRecent = from === undefined;
  start = from ?? 0;
  size = isLarge ? "large" : "small";
  readAll(attach());
  document.addEventListener("refreshed", () => readAll(attach()));
  for (const kind of ["open", "lost"]) on(kind, () => readAll(new Set([...figures.keys()].map((key) => key.split(" ")[0]))));
  const changed = new Set();
  on("metric", ({ pod_name: worker, name, value, date, metadata }) => {
    if (!worker || !METRICS.includes(name)) return;
    const figure = figures.get(`${worker} ${name}`);
    if (!figure) {
      // The first figure of a GPU has no place on the page yet.
      if (figures.has(`${worker} cpu`)) refresh();
      return;
    }
    add(figure, Date.parse(date) / 1000, value);
    if (metadata.includes('"machine"')) figure.element.querySelector(".scope").textContent = "machine";
    // One drawing for the events that arrive together, and none while the page is hidden.
    if (!changed.size) requestAnimationFrame(() => { changed.forEach(show); changed.clear(); });
    changed.add(figure);
  });
}
