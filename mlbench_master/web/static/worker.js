// The page of a worker: charts of its load during the whole run. Its log has its own script, logs.js.
import { on, refresh } from "./app.js";
import { follow } from "./load.js";

const { run, start } = document.getElementById("worker").dataset;

follow({ from: Number(start), isLarge: true });
const name = document.querySelector("#worker h1").textContent;
// The age of the last sample.
on("metric", (data) => { if (data.pod_name === name) refresh(); });
for (const kind of ["state", "deleted"]) on(kind, (data) => { if (data.id === Number(run)) refresh(); });
