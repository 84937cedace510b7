// The charts of a run's page: one for each quantity, with training, validation and the goal in the same chart.
//
// The names of the metrics come from the page (the list #names), which is read again when metrics arrive. The points
// come from the API, thinned by the master. The choices are kept in the address, so that a link shows the same charts.
import { on, root } from "./app.js";
import { COUNTS, chart, countsAt, join, short } from "./charts.js";

const run = document.getElementById("run").dataset.run;
const box = document.getElementById("charts");
const problem = document.getElementById("curves-problem");
const MOST_RANKS = 16;
const MOST_CHARTS = 12;
// The API answers with at most this number of curves.
const MOST_AT_ONCE = 100;
const MILLISECONDS_BETWEEN = 2000;
const TITLES = {
  loss: "Loss",
  lr: "Learning rate",
  samples_per_s: "Throughput of worker 0 (samples/s)",
  tokens_per_s: "Throughput of worker 0 (tokens/s)",
};

// Numbers of the whole run, which follow those of the training and the validation.
const LAST = ["lr", "samples_per_s", "tokens_per_s"];

// The choices

const choices = { against: "epoch", ranks: "0" };
let added = [];

function readAddress() {
  const query = new URLSearchParams(location.search);
  for (const name of Object.keys(choices)) {
    const select = document.getElementById(name);
    if ([...select.options].some((option) => option.value === query.get(name))) choices[name] = query.get(name);
    select.value = choices[name];
  }
  added = [...new Set(query.getAll("chart"))].slice(0, MOST_CHARTS);
}

function keepInAddress() {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(choices)) url.searchParams.set(name, value);
  url.searchParams.delete("chart");
  for (const name of added) url.searchParams.append("chart", name);
  history.replaceState(null, "", url);
}

// What to draw

/** Return the ranks of each metric by its name, without " @ RANK"; empty for a name without a rank. */
function metrics() {
  const options = document.querySelectorAll("#names option");
  return new Map([...options].map((option) => [option.value, option.dataset.ranks.split(" ").filter(Boolean)]));
}

/** Return the charts to draw: title -> the metrics in it, each with the label of its curve. */
function quantities(known) {
  const found = new Map();
  const add = (quantity, name, label) => {
    if (!found.has(quantity)) found.set(quantity, []);
    found.get(quantity).push({ name, label });
  };
  for (const name of known.keys()) {
    if (name.startsWith("train_")) add(name.slice(6), name, "train");
    else if (name.startsWith("val_global_")) add(name.slice(11), name, "validation");
    // The value of one worker is that of all workers if the script averages it.
    else if (name.startsWith("val_") && !known.has(`val_global_${name.slice(4)}`)) add(name.slice(4), name, "validation");
    else if (LAST.includes(name)) add(name, name, "value");
  }
  // A script without a Tracker has names of its own.
  if (!found.size) for (const name of [...known.keys()].slice(0, 4)) add(name, name, "value");
  const usual = [...found.keys()].sort((a, b) => place(a) - place(b)).slice(0, MOST_CHARTS);
  const chosen = new Map(usual.map((quantity) => [quantity, { title: TITLES[quantity] ?? quantity, parts: found.get(quantity) }]));
  for (const name of added) chosen.set(`added ${name}`, { title: name, parts: [{ name, label: "value" }], added: name });
  return chosen;
}

function place(quantity) {
  return quantity === "loss" ? -1 : LAST.indexOf(quantity) + 1;
}

/** Return the curves of a chart: the full names of metrics with the labels of the legend. */
function curvesOf(parts, known) {
  const curves = [];
  for (const { name, label } of parts) {
    const all = known.get(name) ?? [];
    if (!all.length) curves.push({ name, label });
    const ranks = choices.ranks === "all" ? all.slice(0, MOST_RANKS) : all.slice(0, 1);
    for (const rank of ranks) {
      curves.push({ name: `${name} @ ${rank}`, label: ranks.length > 1 ? `${label}, worker ${rank}` : label });
    }
  }
  return curves;
}

// The horizontal axis

/** Return the positions of a curve's points, null for an unknown one, or null if its entries do not have them. */
function positions(curve, against, count) {
  if (COUNTS[against]) {
    const [places, countPlaces] = [positions(curve, "epoch"), count?.value.length ? positions(count, "epoch") : null];
    return places && countPlaces && countsAt(places, countPlaces, count.value);
  }
  if (against === "step") return curve.step;
  if (against === "time") return curve.time_s;
  if (curve.epoch.some((epoch) => epoch === null)) return null;
  return countsSteps() ? curve.epoch : epochs(curve);
}

/** Return true if the run counts steps: its entries have the number of finished steps in the place of the epoch. */
function countsSteps() {
  return document.getElementById("goal").dataset.unit === "steps";
}

/** Return the number of epochs that were finished at each point: entries of one epoch lie evenly in it. */
function epochs({ epoch, step }) {
  const starts = epoch.flatMap((value, index) => (index === 0 || value !== epoch[index - 1] ? [index] : []));
  const result = [];
  let length = 1;
  starts.forEach((start, number) => {
    const end = starts[number + 1] ?? epoch.length;
    const own = (number + 1 < starts.length ? step[end] : step[end - 1] + 1) - step[start];
    // The last epoch may still go on, and is then as long as the one before.
    length = number + 1 < starts.length || number === 0 ? own : Math.max(own, length);
    for (let index = start; index < end; index += 1) result.push(epoch[index] + (step[index] - step[start] + 1) / length);
  });
  return result;
}

const UNITS = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];

/** Return the columns of a chart, and the title of its horizontal axis. */
function columns(curves, threshold, count) {
  let against = choices.against;
  if (curves.some((curve) => positions(curve, against, count) === null)) against = "step";
  let title = against === "epoch" && countsSteps() ? "step" : against;
  let unit = 1;
  if (against === "time") {
    const longest = Math.max(0, ...curves.map((curve) => curve.time_s.at(-1) ?? 0));
    [unit, title] = UNITS.find(([seconds]) => longest >= 3 * seconds) ?? UNITS.at(-1);
    title = `time in ${title}`;
  }
  if (COUNTS[against]) {
    const largest = Math.max(0, ...count.value);
    [unit, title] = COUNTS[against].units.find(([size]) => largest >= size) ?? [1, ""];
    title = `${title} ${COUNTS[against].title}`.trim();
  }
  const tables = curves.map((curve) => {
    const xs = positions(curve, against, count);
    // A resumed run has some epochs twice.
    const order = [...xs.keys()].filter((index) => xs[index] !== null).sort((a, b) => xs[a] - xs[b]);
    return [order.map((index) => xs[index] / unit), order.map((index) => curve.value[index])];
  });
  if (threshold !== null) {
    const ends = tables.flatMap(([xs]) => (xs.length ? [xs[0], xs.at(-1)] : []));
    const xs = ends.length ? [...new Set([Math.min(...ends), Math.max(...ends)])] : [];
    tables.push([xs, xs.map(() => threshold)]);
  }
  return [tables.length ? join(tables) : [], title];
}

// The charts on the page

const shown = new Map();

function figure(key, title, name) {
  const element = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const heading = document.createElement("h3");
  const latest = document.createElement("p");
  const place = document.createElement("div");
  heading.textContent = title;
  latest.className = "faint";
  place.className = "chart";
  caption.append(heading, latest);
  if (name !== undefined) {
    const button = document.createElement("button");
    button.className = "quiet";
    button.textContent = "Remove";
    button.setAttribute("aria-label", `Remove the chart of ${name}`);
    button.addEventListener("click", () => {
      added = added.filter((other) => other !== name);
      keepInAddress();
      update();
      document.getElementById("name").focus();
    });
    heading.append(" ", button);
  }
  element.append(caption, place);
  const one = { element, latest, place, layout: "", plot: null };
  shown.set(key, one);
  return one;
}

function draw(wanted, answers) {
  for (const [key, one] of shown) {
    if (!wanted.has(key)) { one.plot?.remove(); one.element.remove(); shown.delete(key); }
  }
  const { metric, threshold } = document.getElementById("goal").dataset;
  for (const [key, { title, added: name, curves }] of wanted) {
    const one = shown.get(key) ?? figure(key, title, name);
    const drawn = curves.filter((curve) => answers.get(curve.name)?.value.length);
    const hasGoal = threshold !== "" && curves.some((curve) => curve.name === `${metric} @ 0`);
    const count = answers.get(COUNTS[choices.against]?.name);
    const [data, xLabel] = columns(drawn.map((curve) => answers.get(curve.name)), hasGoal ? Number(threshold) : null, count);
    const labels = drawn.map((curve) => curve.label);
    const texts = drawn.slice(0, 4).map((curve) => [curve.label, short(last(answers.get(curve.name).value))]);
    if (hasGoal) { labels.push("goal"); texts.push(["goal", short(Number(threshold))]); }
    one.latest.textContent = drawn.length ? texts.map((text) => text.join(" ")).join(", ") : "No values yet.";
    // All digits where the mouse points, as everywhere.
    one.latest.title = drawn.map((curve) => `${curve.label} ${last(answers.get(curve.name).value) ?? "-"}`).join("\n");
    if (one.element.parentNode === null) box.append(one.element);
    // A name that somebody mistyped, or of which values will come.
    if (!drawn.length) { one.plot?.remove(); one.plot = null; one.layout = ""; continue; }
    // The same chart gets new points, and keeps what its user has zoomed to.
    const layout = JSON.stringify([labels, xLabel]);
    if (one.layout === layout) { one.plot.set(data); continue; }
    one.plot?.remove();
    one.layout = layout;
    const series = labels.map((label, index) => (
      hasGoal && index === labels.length - 1 ? { label, color: "--c7", dash: [6, 4] } : { label }
    ));
    const isWhole = xLabel === "step" || (xLabel === "epoch" && data[0].every(Number.isInteger));
    one.plot = chart(one.place, { series, xLabel, isWhole, label: `${title} against ${xLabel}` }, data);
  }
}

function last(values) {
  return values.findLast((value) => value !== null);
}

// Reading

let reading = false;
let again = false;

async function update() {
  again = true;
  if (reading) return;
  reading = true;
  while (again && !document.hidden) {
    again = false;
    const started = performance.now();
    try {
      await read();
      problem.hidden = true;
    } catch (error) {
      problem.textContent = `The curves cannot be read: ${error.message}`;
      problem.hidden = false;
    }
    // A master that needs long for the answer is asked less often.
    const pause = Math.max(MILLISECONDS_BETWEEN, 4 * (performance.now() - started));
    if (again) await new Promise((resume) => setTimeout(resume, pause));
    else await new Promise((resume) => setTimeout(resume, 200));
  }
  reading = false;
}

async function read() {
  const known = metrics();
  const wanted = quantities(known);
  for (const chosen of wanted.values()) chosen.curves = curvesOf(chosen.parts, known);
  for (const [axis, { name }] of Object.entries(COUNTS)) {
    const option = document.querySelector(`#against option[value=${axis}]`);
    option.hidden = option.disabled = !known.get(name.slice(0, -4))?.includes("0");
  }
  const drawn = [...wanted.values()].flatMap((chosen) => chosen.curves.map((curve) => curve.name));
  const names = [...new Set([...drawn, ...(COUNTS[choices.against] ? [COUNTS[choices.against].name] : [])])];
  const answers = new Map();
  for (let start = 0; start < names.length; start += MOST_AT_ONCE) {
    const query = new URLSearchParams(names.slice(start, start + MOST_AT_ONCE).map((name) => ["metric", name]));
    const answer = await fetch(`${root}/api/runs/${run}/curves/?${query}`);
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.message);
    for (const curve of content.curves) answers.set(curve.name, curve);
  }
  draw(wanted, answers);
}

for (const name of Object.keys(choices)) {
  document.getElementById(name).addEventListener("change", (event) => {
    choices[name] = event.target.value;
    keepInAddress();
    update();
  });
}
document.getElementById("add").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = document.getElementById("name");
  if (input.value && !added.includes(input.value) && added.length < MOST_CHARTS) added.push(input.value);
  input.value = "";
  keepInAddress();
  update();
});
on("metric", (data) => { if (String(data.run_id) === run) update(); });
document.addEventListener("refreshed", update); // there may be new metrics, or the goal
document.addEventListener("visibilitychange", update);
readAddress();
update();
