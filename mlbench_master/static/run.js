// The page of a run: changes make the page read itself again. Its log has its own script, logs.js.
import { on, refresh } from "./app.js";

const id = Number(document.getElementById("run").dataset.run);

on("state", (data) => { if (data.id === id) refresh(); });
on("deleted", (data) => { if (data.id === id) refresh(); });
on("metric", (data) => { if (data.run_id === id) refresh(); });
