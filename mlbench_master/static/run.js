// The page of a run: its log grows line by line, and other changes make the page read itself again.
import { on, refresh } from "./app.js";
import "./curves.js";

const id = Number(document.getElementById("run").dataset.run);
const MOST_LINES = 2000;

function toEnd() {
  const log = document.getElementById("log");
  log.scrollTop = log.scrollHeight;
}

on("state", (data) => { if (data.id === id) refresh(); });
on("deleted", (data) => { if (data.id === id) refresh(); });
on("metric", (data) => { if (data.run_id === id) refresh(); });
on("log", (data) => {
  if (data.run_id !== id) return;
  const log = document.getElementById("log");
  const next = Number(log.dataset.next);
  if (data.line < next) return; // the page had it already
  if (data.line > next) { refresh(); return; }
  log.dataset.next = next + 1;
  const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 5;
  const who = data.rank === null ? "master" : `rank ${data.rank}`;
  log.append(`${data.date} ${who.padStart(7)} | ${data.text}\n`);
  if (log.childNodes.length > MOST_LINES) log.firstChild.remove();
  if (isAtEnd) toEnd();
});
document.addEventListener("refreshed", toEnd);
toEnd();

// The filter of the metrics is a part of the address, by which the page reads itself.
const filter = document.querySelector("#filter input");
let typed = 0;
filter.addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => {
    const url = new URL(location.href);
    if (filter.value) url.searchParams.set("filter", filter.value);
    else url.searchParams.delete("filter");
    history.replaceState(null, "", url);
    refresh();
  }, 300);
});
filter.form.addEventListener("submit", (event) => event.preventDefault());
