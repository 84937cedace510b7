// Charts by uPlot, in the colors of the style sheet, as wide as their element. They follow the width and the theme.
import { localDate } from "./app.js";

/** Return a color of the style sheet, for example color("--c1"). */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return a number with four significant digits. */
export function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e15) return Math.round(value).toLocaleString("en-US");
  return size !== 0 && size < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}

/** Return bytes with a unit, as mlbench_master/web/render.py writes them. */
export function bytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${Number(value.toPrecision(3))} ${units[power]}`;
}

/** Return the value of a curve, [xs, ys], at a place between its first and its last one, interpolated. */
export function valueAt([xs, ys], x) {
  const next = xs.findIndex((one) => one >= x);
  if (xs[next] === x) return ys[next];
  const share = (x - xs[next - 1]) / (xs[next] - xs[next - 1]);
  return ys[next - 1] + share * (ys[next] - ys[next - 1]);
}

// Counts of worker 0 since the start, against which curves can be drawn. The Tracker sends them at the end of an epoch.
export const COUNTS = {
  tokens: { name: "tokens @ 0", title: "tokens of worker 0", units: [[1e9, "billion"], [1e6, "million"], [1e3, "thousand"], [1, ""]] },
  bytes: { name: "bytes_on_wire @ 0", title: "on the wire by worker 0", units: [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "bytes"]] },
};

/** Return the count at each place, which is an epoch or a step as those of the count; null where it was not measured yet. */
export function countsAt(places, countPlaces, counts) {
  // At the place 0 nothing has been counted. A resumed run has some places twice.
  const known = [...new Map([[0, 0], ...countPlaces.map((place, index) => [place, counts[index]])])].sort((a, b) => a[0] - b[0]);
  const curve = [known.map(([place]) => place), known.map(([, count]) => count)];
  return places.map((place) => (place < 0 || place > curve[0].at(-1) ? null : valueAt(curve, place)));
}

/** Join the points of several curves, each [xs, ys], to the columns of one chart: [all xs, ys of each curve]. */
export function join(curves) {
  return uPlot.join(curves.map(([xs, ys]) => [xs, ys]));
}

/**
 * Draw a chart into an element, and return the functions of it.
 *
 * @param {HTMLElement} element - An empty element.
 * @param {object} options
 *   series: [{label, color?, dash? (of a line without points), format?, hidden?}], one for each column of values;
 *   xLabel: title of the horizontal axis; isTime: x is in seconds since 1970; isWhole: x has whole numbers only;
 *   format: writes a value of the vertical axis; height: pixels; sparkline: no axes and no legend; min, max: of y;
 *   log: a logarithmic vertical axis; label: name for screen readers;
 *   bands: [[high, low]], numbers of series (from 0), between which the color of the first one fills the area.
 * @param {Array<Array<number|null>>} data - Columns: xs in ascending order, then the values of each series.
 * @returns {{set: function(Array): void, remove: function(): void}}
 */
export function chart(element, options, data) {
  let columns = data;
  let plot = null;
  const isEmpty = () => columns[0].length === 0;

  function draw() {
    plot?.destroy();
    plot = null;
    if (!element.isConnected || element.clientWidth === 0) return;
    plot = new uPlot(settings(options, element.clientWidth), columns, element);
    if (options.label) {
      plot.ctx.canvas.setAttribute("role", "img");
      plot.ctx.canvas.setAttribute("aria-label", options.label);
    }
  }
  const resized = new ResizeObserver(() => {
    if (!element.isConnected) remove();
    else if (!plot) draw();
    else plot.setSize({ width: element.clientWidth, height: plot.height });
  });
  const pressed = (event) => { if (plot && press(plot, event)) event.preventDefault(); };
  if (!options.sparkline) {
    element.tabIndex = 0;
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", `${options.label ?? "chart"}. ${KEYS}`);
    element.addEventListener("keydown", pressed);
  }
  const theme = matchMedia("(prefers-color-scheme: dark)");
  theme.addEventListener("change", draw);
  resized.observe(element);

  function remove() {
    resized.disconnect();
    element.removeEventListener("keydown", pressed);
    theme.removeEventListener("change", draw);
    plot?.destroy();
    plot = null;
  }
  function set(fresh) {
    const wasEmpty = isEmpty();
    const zoom = plot && !wasEmpty ? zoomOf(plot) : null;
    columns = fresh;
    if (!plot || wasEmpty) draw();
    else if (zoom === null) plot.setData(columns);
    else {
      plot.setData(columns, false);
      plot.setScale("x", zoom);
    }
  }
  draw();
  return { set, remove };
}

// style.css shows these below a chart that has the focus.
const KEYS = "Arrow keys show values, + and - zoom, 0 shows everything, 1 to 9 hide a curve.";

/** Do for a key what dragging and the legend do for a mouse; return whether the key means something. */
function press(plot, event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return false;
  const xs = plot.data[0];
  const { min, max } = plot.scales.x;
  const at = plot.cursor.idx ?? null;
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    const step = event.key === "ArrowLeft" ? -1 : 1;
    const [first, last] = plot.series[0].idxs;
    const next = at === null ? (step > 0 ? first : last) : Math.min(Math.max(at + step, first), last);
    plot.setCursor({ left: plot.valToPos(xs[next], "x"), top: plot.over.clientHeight / 2 });
  } else if (event.key === "+" || event.key === "-") {
    const middle = at === null ? (min + max) / 2 : xs[at];
    const half = (max - min) * (event.key === "+" ? 0.25 : 1);
    plot.setScale("x", { min: Math.max(middle - half, xs[0]), max: Math.min(middle + half, xs.at(-1)) });
  } else if (event.key === "0") {
    plot.setScale("x", { min: xs[0], max: xs.at(-1) });
  } else if (/^[1-9]$/.test(event.key)) {
    const curve = plot.series.filter((one, index) => index > 0 && one.class !== "edge")[Number(event.key) - 1];
    if (curve) plot.setSeries(plot.series.indexOf(curve), { show: !curve.show });
  } else return false;
  return true;
}

/** Return the part of the horizontal axis that a user has zoomed to, or null if the chart shows everything. */
function zoomOf(plot) {
  const { min, max } = plot.scales.x;
  const xs = plot.data[0];
  return min > xs[0] || max < xs.at(-1) ? { min, max } : null;
}

// Distances between the marks of an axis of whole numbers.
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

/** Return the least pixels between two marks of an axis of numbers, so that the longest number fits. */
function labelRoom(plot, axis, min, max) {
  const places = Math.min(20, Math.max(0, Math.ceil(-Math.log10((max - min) / 10))));
  const text = max.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  return Math.max(50, 8 * text.length + 8);
}

function settings(options, width) {
  const { sparkline = false, format = short, height = sparkline ? 48 : 256 } = options;
  const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const values = (_, splits) => splits.map((value) => (value === null ? "" : format(value)));
  const series = options.series.map((one, index) => {
    const stroke = color(one.color ?? `--c${(index % 8) + 1}`);
    // The edge of a band has neither a line nor an entry in the legend, which style.css hides.
    if (one.hidden) return { label: one.label, stroke, width: 0, spanGaps: true, points: { show: false }, class: "edge" };
    return {
      label: one.label,
      stroke,
      width: sparkline ? 1.5 : 2,
      dash: one.dash,
      fill: sparkline ? `${stroke}22` : undefined,
      spanGaps: true,
      points: sparkline || one.dash ? { show: false } : undefined,
      value: (_, value) => (one.format ?? format)(value),
    };
  });
  const clock = (plot, splits) => splits.map((value) => date(value).slice(...(isLong(plot) ? [5, 16] : [11, 19])));
  return {
    width,
    height,
    padding: sparkline ? [2, 0, 2, 0] : undefined,
    cursor: { show: !sparkline, drag: { x: !sparkline, y: false } },
    legend: { show: !sparkline, live: true },
    scales: {
      x: { time: options.isTime ?? false },
      y: { distr: options.log ? 3 : 1, range: (_, low, high) => range(options, low, high) },
    },
    axes: sparkline
      ? [{ show: false }, { show: false }]
      : [{ ...axis, label: options.xLabel, ...(options.isTime ? { values: clock, space: 80 } : { space: labelRoom }), labelSize: 24, incrs: options.isWhole ? WHOLE : undefined }, { ...axis, size: 64, values }],
    bands: (options.bands ?? []).map(([high, low]) => ({ series: [high + 1, low + 1], fill: `${series[high].stroke}33` })),
    series: [{ label: options.xLabel ?? (options.isTime ? localDate(Date.now()).zone : "x"), value: (_, value) => (options.isTime ? date(value) : short(value)) }, ...series],
  };
}

function date(seconds) {
  if (seconds === null) return "-";
  const { day, time } = localDate(seconds * 1000);
  return `${day} ${time}`;
}

/** Return true if a chart shows more than a day, so that its times need their date. */
function isLong(plot) {
  return plot.scales.x.max - plot.scales.x.min > 86400;
}

function range(options, low, high) {
  if (low === null) return [options.min ?? 0, options.max ?? 1];
  if (options.log) return uPlot.rangeLog(low, high, 10, true);
  const [from, to] = uPlot.rangeNum(low, high, 0.08, true);
  return [options.min ?? from, options.max === undefined ? to : Math.max(options.max, high)];
}
