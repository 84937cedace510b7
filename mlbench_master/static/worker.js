// The page of a worker: charts of its load during the whole run, and the end of its log.
import { on, refresh } from "./app.js";
import { follow } from "./load.js";

const { run, rank, start } = document.getElementById("worker").dataset;
const MOST_LINES = 1000;

function toEnd() {
  const log = document.getElementById("log");
  log.scrollTop = log.scrollHeight;
}

follow({ from: Number(start) });
for (const kind of ["state", "deleted"]) on(kind, (data) => { if (data.id === Number(run)) refresh(); });
on("log", (line) => {
  const log = document.getElementById("log");
  if (line.run_id !== Number(run) || line.rank !== Number(rank) || line.line < Number(log.dataset.next)) return;
  const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 5;
  log.append(`${line.date} ${line.stream} | ${line.text}\n`);
  if (log.childNodes.length > MOST_LINES) log.firstChild.remove();
  if (isAtEnd) toEnd();
});
document.addEventListener("refreshed", toEnd);
toEnd();
