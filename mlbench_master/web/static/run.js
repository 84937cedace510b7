// The page of a run: changes make the page read itself again. Its log has its own script, logs.js.
import { leaveFor, on, refresh, root } from "./app.js";
import "./curves.js";

const id = Number(document.getElementById("run").dataset.run);

on("state", (data) => { if (data.id === id) refresh(); });
on("deleted", (data) => { if (data.id === id) leaveFor(`${root}/runs/`); });
on("metric", (data) => { if (data.run_id === id) refresh(); });

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

// Only what was changed here is sent: the rest may have been changed elsewhere since the page was opened.
const words = document.querySelector("#words-box form");
words.addEventListener("formdata", ({ formData }) => {
  for (const { name, value, defaultValue } of words.elements) if (value === defaultValue) formData.delete(name);
});
