// The list of runs reads itself again when a run changes.
import { on, refresh } from "./app.js";

on("state", refresh);
on("deleted", refresh);
on("metric", (data) => { if (["goal @ 0", "TaskResult @ 0"].includes(data.name)) refresh(); });
