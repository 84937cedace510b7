// The list of runs reads itself again when a run changes. The chosen runs stay chosen, also those of other pages.
import { on, refresh } from "./app.js";

const chosen = new Set();
const live = document.getElementById("live");
const form = document.getElementById("chosen");
const filter = document.getElementById("filter");
const texts = { stop: "Their metrics and logs stay.", delete: "Their metrics, logs and results are deleted, too." };

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

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (chosen.size) location.href = `/compare/?${[...chosen].map((id) => `run=${id}`).join("&")}`;
  else live.textContent = "Choose at least one run first: each row has a box at its beginning.";
});

form.addEventListener("click", async (event) => {
  const action = event.target.dataset.all;
  if (!action || !confirm(`${event.target.textContent} ${chosen.size} runs? ${texts[action]}`)) return;
  let problem = "";
  for (const id of [...chosen]) {
    try {
      const answer = await (action === "stop"
        ? fetch(`/api/runs/${id}/stop/`, { method: "POST" })
        : fetch(`/api/runs/${id}/`, { method: "DELETE" }));
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

// A reading that began with another filter may end after it, so the list is read once more.
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target.id !== "list") return;
  show();
  refresh();
});
document.addEventListener("refreshed", show);
// The browser's way back shows another list, to which the fields of the filter belong.
document.addEventListener("htmx:historyRestore", () => {
  const address = new URLSearchParams(location.search);
  filter.elements.q.value = address.get("q") || "";
  filter.elements.state.value = address.get("state") || "";
  filter.elements.sort.value = address.get("sort") || "-created_at";
  show();
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
