// The main page: charts of the load of workers, and lists of runs that follow the events of the master.
import { on, refresh } from "./app.js";
import { follow } from "./load.js";

const PAUSE_MS = 3000;
let isWaiting = false;

follow();
on("state", refresh);
on("deleted", refresh);
on("metric", ({ run_id: id }) => {
  // Values of the goal; a run sends many metrics, and one update of the page shows them all.
  if (id === null || isWaiting || !document.querySelector(`#open [data-run="${Number(id)}"]`)) return;
  isWaiting = true;
  setTimeout(() => { isWaiting = false; refresh(); }, PAUSE_MS);
});
