// The list of runs reads itself again when a run changes. The chosen runs stay chosen, also those of other pages.
import { on, refresh, root } from "./app.js";

const chosen = new Set();
const live = document.getElementById("live");
const form = document.getElementById("chosen");
const filter = document.getElementById("filter");
const texts = { stop: "Metrics and logs stay.", delete: "Metrics, logs and results are deleted, too." };

const boxes = () => document.querySelectorAll("#runs input[name=run]");

function show() {
  for (const box of boxes()) box.checked = chosen.has(box.value);
  const count = document.getElementById("chosen-count");
  const text = chosen.size ? `${chosen.size} chosen` : "Choose runs to compare.";
  if (count.textContent !== text) count.textContent = text;
  for (const button of form.querySelectorAll("[data-all]")) button.hidden = !chosen.size;
}

document.addEventListener("change", (event) => {
  if (event.target.name !== "run") return;
  if (event.target.checked) chosen.add(event.target.value);
  else chosen.delete(event.target.value);
  show();
});

document.getElementById("choose-all").addEventListener("click", () => {
  const all = [...boxes()];
  const isAll = all.every((box) => chosen.has(box.value));
  for (const { value } of all) if (isAll) chosen.delete(value); else chosen.add(value);
  show();
});

// A list has a hundred links and boxes: arrow keys go from row to row in one column.
document.getElementById("main").addEventListener("keydown", (event) => {
  const row = event.target.closest("#runs tbody tr, #groups tbody tr");
  if (!row || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  const rows = [...row.parentNode.rows];
  const at = rows.indexOf(row);
  const next = rows[{ ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: rows.length - 1 }[event.key]];
  if (!next) return;
  event.preventDefault();
  const cell = next.cells[event.target.closest("td, th").cellIndex];
  (cell.querySelector("a, input") ?? next.querySelector("a")).focus();
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (chosen.size) location.href = `${root}/compare/?${[...chosen].map((id) => `run=${id}`).join("&")}`;
  else live.textContent = "Choose at least one run first: each row has a box at its beginning.";
});

form.addEventListener("click", async (event) => {
  const action = event.target.dataset.all;
  const runs = chosen.size === 1 ? "run" : "runs";
  if (!action || !confirm(`${event.target.textContent} ${chosen.size} ${runs}? ${texts[action]}`)) return;
  let problem = "";
  for (const id of [...chosen]) {
    try {
      const answer = await (action === "stop"
        ? fetch(`${root}/api/runs/${id}/stop/`, { method: "POST" })
        : fetch(`${root}/api/runs/${id}/`, { method: "DELETE" }));
      if (!answer.ok && answer.status !== 404) problem = (await answer.json()).message;
      else chosen.delete(id);
    } catch {
      problem = "The master does not answer.";
    }
  }
  live.textContent = problem;
  show();
  refresh();
});

document.addEventListener("refreshed", show);

/** Show the list of another address. Without this script, its links and the form do. */
async function go(address) {
  // A reading of the earlier address would bring its list back.
  htmx.trigger("#main", "htmx:abort");
  // Not from the link, which an update of the list may replace: htmx would drop the answer.
  const options = { source: "#chosen-count", target: "#list", select: "#list", swap: "outerHTML" };
  await htmx.ajax("GET", address, options).catch(() => {});
  show();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("#list a[id^=sort-], #list a[id^=page-]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  history.pushState(null, "", link.href);
  filter.elements.sort.value = new URLSearchParams(location.search).get("sort") || "-created_at";
  go(link.href);
});

function applyFilter() {
  const given = new URLSearchParams(new FormData(filter));
  for (const [name, value] of [...given]) if (!value || value === "-created_at") given.delete(name);
  const address = `${given}` ? `${root}/runs/?${given}` : `${root}/runs/`;
  history.replaceState(null, "", address);
  go(address);
}

let pause;
filter.addEventListener("input", () => { clearTimeout(pause); pause = setTimeout(applyFilter, 250); });
filter.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(pause); applyFilter(); });

window.addEventListener("popstate", () => {
  const address = new URLSearchParams(location.search);
  filter.elements.q.value = address.get("q") || "";
  filter.elements.state.value = address.get("state") || "";
  filter.elements.group.value = address.get("group") || "";
  filter.elements.sort.value = address.get("sort") || "-created_at";
  go(location.href);
});

on("state", refresh);
on("deleted", (data) => { chosen.delete(String(data.id)); refresh(); });
on("metric", (data) => {
  if (["goal @ 0", "TaskResult @ 0"].includes(data.name) || data.name.startsWith("val_global_")) refresh();
});
// The duration of a run grows without an event.
setInterval(() => { if (document.querySelector("#runs .state-started")) refresh(); }, 10000);

// A browser may have kept the boxes of an earlier visit.
for (const box of boxes()) if (box.checked) chosen.add(box.value);
show();
