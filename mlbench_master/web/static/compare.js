// The compare page: it reads itself again when a chosen run changes, and draws the curves of all chosen runs.
import { on, refresh, root } from "./app.js";
import { COUNTS, chart, countsAt, join, valueAt } from "./charts.js";

const element = document.getElementById("curves");
const metric = document.getElementById("metric");
const against = document.getElementById("against");
const repeats = document.getElementById("repeats");
// The page shows many curves at once, and each has fewer points than on the page of its run.
const POINTS = 400;
const AXES = { time_s: "seconds since the start", epoch: "epoch, or step of a run that counts steps", step: "number of the entry", tokens: "tokens of worker 0", bytes: "bytes on the wire by worker 0" };
const DASHES = [undefined, [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [14, 4], [1, 5]];

/** Return the chosen runs: id, name, and row in the table ("" without one). */
function runs() {
  return [...document.querySelectorAll("#compared tr[data-run]")].map(({ dataset }) => (
    { id: Number(dataset.run), name: dataset.name, row: dataset.row }
  ));
}

const isChosen = (id) => runs().some((run) => run.id === id);
// A search may also find runs that start later, as those of a sweep do.
const isSearch = new URLSearchParams(location.search).has("q");
on("state", (data) => {
  // The last metrics of a run may have been stored without an event.
  if (isChosen(data.id)) changed.add(data.id);
  if (isSearch || isChosen(data.id)) refresh();
});
on("deleted", (data) => {
  if (!isChosen(data.id)) return;
  // The page of no runs has other parts.
  if (runs().length === 1) location.reload();
  else refresh();
});
on("metric", (data) => {
  if (!isChosen(data.run_id)) return;
  if (["goal @ 0", "TaskResult @ 0", "result @ 0"].includes(data.name)) refresh();
  const isCount = Object.values(COUNTS).some(({ name }) => name === data.name);
  if (data.name === metric.value || isCount || !known.has(data.name)) changed.add(data.run_id);
});
// Metrics may have arrived while nothing was heard of the master.
for (const kind of ["open", "lost"]) on(kind, () => { for (const { id } of runs()) changed.add(id); });

// Figures: the server draws them for seconds, so only when the results are others.
const keyOfFigures = () => document.getElementById("comparison").dataset.key;
let drawn = "";
function drawFigures() {
  const key = keyOfFigures();
  document.getElementById("figures-card").hidden = key === "";
  if (key === drawn) return;
  drawn = key;
  if (key) htmx.trigger("#figures", "draw");
}

// A reading of the page must not change the list of labels while somebody chooses one.
const options = document.getElementById("options");
const baseline = () => document.getElementById("baseline");
options?.addEventListener("focusin", () => baseline().removeAttribute("data-live"));
options?.addEventListener("focusout", (event) => {
  if (!options.contains(event.relatedTarget)) baseline().setAttribute("data-live", "");
});

// Curves: answers of the master by run and metric, read again for the runs of which something has arrived.
const curves = new Map();
const changed = new Set();
const asked = new Set(); // ids of the runs that were read at least once
const known = new Set();
let shown = null; // the chart
let isTouched = false;

async function ask(id, query) {
  const answer = await fetch(`${root}/api/runs/${id}/curves/${query}`).catch(() => null);
  return answer?.ok ? (await answer.json()).curves : null;
}

/** Add the metrics of the first worker of some runs to the list, and at first choose that of the goal or the loss. */
async function addNames(ids) {
  for (const id of ids) asked.add(id);
  const answers = await Promise.all(ids.map((id) => ask(id, "")));
  for (const { name } of answers.flatMap((found) => found ?? [])) known.add(name);
  const listed = new Set([...metric.options].map((option) => option.value));
  for (const name of [...known].sort()) {
    const isText = ["goal @ 0", "summary @ 0", "result @ 0", "TaskResult @ 0"].includes(name);
    if (listed.has(name) || isText || (name.includes(" @ ") && !name.endsWith(" @ 0"))) continue;
    const after = [...metric.options].find((option) => option.value > name) ?? null;
    metric.add(new Option(name.replace(/ @ 0$/, ""), name), after);
  }
  for (const [axis, { name }] of Object.entries(COUNTS)) {
    if (known.has(name) && ![...against.options].some((option) => option.value === axis)) against.add(new Option(AXES[axis], axis));
  }
  const first = [metric.dataset.first, "train_loss @ 0"].find((name) => known.has(name));
  if (!shown && !isTouched && first) metric.value = first;
}

async function read(ids) {
  const name = metric.value;
  if (!name) return;
  await Promise.all(ids.map(async (id) => {
    const names = [name, ...Object.values(COUNTS).map((count) => count.name).filter((one) => known.has(one))];
    const found = await ask(id, `?${new URLSearchParams([["points", POINTS], ...names.map((one) => ["metric", one])])}`);
    for (const curve of found ?? []) curves.set(`${id} ${curve.name}`, curve);
  }));
}

/** Return [xs, ys] of a run: ascending xs, each once; of several values at one place, the last one counts. */
function curveOf(run) {
  const curve = curves.get(`${run.id} ${metric.value}`);
  const points = new Map();
  let places = curve?.[against.value];
  if (curve && COUNTS[against.value]) {
    const count = curves.get(`${run.id} ${COUNTS[against.value].name}`);
    // Of the values of an epoch, the last one counts: it is that at the end, as the count.
    const isCounted = count && count.value.length && ![...curve.epoch, ...count.epoch].includes(null);
    places = isCounted ? countsAt(curve.epoch.map((one) => one + 1), count.epoch.map((one) => one + 1), count.value) : [];
  }
  places?.forEach((x, index) => {
    if (x !== null && curve.value[index] !== null) points.set(x, curve.value[index]);
  });
  const xs = [...points.keys()].sort((a, b) => a - b);
  return [xs, xs.map((x) => points.get(x))];
}

/** Return [xs, means, highs, lows] of curves from the last start to the first end, as the figures of the command. */
function band(group) {
  const from = Math.max(...group.map(([xs]) => xs[0]));
  const to = Math.min(...group.map(([xs]) => xs.at(-1)));
  const all = [...new Set(group.flatMap(([xs]) => xs))].sort((a, b) => a - b).filter((x) => x >= from && x <= to);
  // More places than pixels would only cost time.
  const xs = all.filter((_, index) => index % Math.ceil(all.length / POINTS) === 0 || index === all.length - 1);
  const values = xs.map((x) => group.map((curve) => valueAt(curve, x)));
  return [
    xs,
    values.map((each) => each.reduce((sum, value) => sum + value, 0) / each.length),
    values.map((each) => Math.max(...each)),
    values.map((each) => Math.min(...each)),
  ];
}

/** Return the lines of the chart: {label, curve} of each run, or {label, curve, high, low} of each row of the table. */
function lines() {
  const found = runs().map((run) => ({ ...run, curve: curveOf(run) })).filter((run) => run.curve[0].length);
  if (!repeats.checked) return found.map((run) => ({ label: run.name, curve: run.curve }));
  const rows = new Map();
  for (const run of found) rows.set(run.row || run.name, [...(rows.get(run.row || run.name) ?? []), run]);
  return [...rows].flatMap(([label, members]) => {
    if (members.length === 1) return { label, curve: members[0].curve };
    const [xs, mean, high, low] = band(members.map((member) => member.curve));
    // Repeats that have no place in common have no mean.
    if (!xs.length) return members.map(({ name, curve }) => ({ label: name, curve }));
    return { label: `${label} (${members.length} runs)`, curve: [xs, mean], high: [xs, high], low: [xs, low] };
  });
}

let signature = "";

function draw() {
  const series = [];
  const data = [];
  const bands = [];
  lines().forEach(({ label, curve, high, low }, index) => {
    const look = { color: `--c${(index % 8) + 1}`, dash: DASHES[Math.floor(index / 8) % DASHES.length] };
    series.push({ label, ...look });
    data.push(curve);
    if (!high) return;
    bands.push([series.length, series.length + 1]);
    for (const edge of ["largest", "smallest"]) series.push({ label: `${label}, ${edge}`, ...look, hidden: true });
    data.push(high, low);
  });
  const names = series.filter((one) => !one.hidden).map((one) => one.label).join("; ") || "none yet";
  const label = `Curves of ${metric.value || "no metric"} against ${AXES[against.value]}: ${names}`;
  const fresh = JSON.stringify([metric.value, against.value, series]);
  if (shown && fresh === signature && data.length) { shown.set(join(data)); return; }
  shown?.remove();
  shown = null;
  signature = fresh;
  element.replaceChildren();
  if (data.length) {
    shown = chart(element, { series, bands, xLabel: AXES[against.value], label, height: 320 }, join(data));
  } else {
    element.ariaLabel = label;
    const empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent = known.size
      ? "The chosen runs have no values of this metric against this axis yet."
      : "The chosen runs have sent no metrics yet. Their curves appear here as they arrive.";
    element.append(empty);
  }
}

if (element) {
  document.getElementById("curves-form").hidden = false;
  metric.addEventListener("change", async () => {
    isTouched = true;
    await read(runs().map((run) => run.id));
    draw();
  });
  for (const control of [against, repeats]) control.addEventListener("change", draw);
  document.addEventListener("refreshed", () => {
    // A run that a search finds later, or again, may have ended before, so no metric of it arrives any more.
    for (const id of asked) if (!isChosen(id)) asked.delete(id);
    for (const { id } of runs()) if (!asked.has(id)) changed.add(id);
    drawFigures();
    draw();
  });
  // New values come many at a time, and only somebody who looks needs them.
  // One reading at a time, since an older answer must not replace a newer one.
  let isReading = true;
  setInterval(async () => {
    if (isReading || !changed.size || document.hidden) return;
    isReading = true;
    const ids = [...changed];
    changed.clear();
    await addNames(ids).then(() => read(ids)).then(draw).finally(() => { isReading = false; });
  }, 2000);
  drawn = keyOfFigures(); // htmx draws these when it has loaded
  const rows = runs().map((run) => run.row).filter((row) => row);
  repeats.checked = new Set(rows).size < rows.length;
  const all = runs().map((run) => run.id);
  addNames(all).then(() => read(all)).then(draw).finally(() => { isReading = false; });
}
