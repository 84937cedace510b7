// The load of the workers on the page of a run.
import { follow } from "./load.js";

follow({ from: Number(document.getElementById("run").dataset.start) });
