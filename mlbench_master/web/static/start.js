// The start form: only the data sets and optimizers of the chosen task, and the names of the runs before they start.
// Without this script, the form shows those of all tasks, and the master refuses the wrong ones.
const form = document.getElementById("start");

function showOptions() {
  const task = form.elements.task.value;
  for (const label of form.querySelectorAll("[data-of-task]")) {
    const groups = [...label.querySelectorAll("optgroup")];
    for (const group of groups) group.hidden = group.disabled = group.dataset.task !== task;
    label.hidden = groups.every((group) => group.hidden) && !label.querySelector(".error");
    const select = label.querySelector("select");
    if (select.selectedOptions[0]?.parentElement.disabled) select.value = "";
  }
}

function preview() {
  const name = form.elements.name.value.trim();
  const workers = [...new Set(form.elements.num_workers.value.split(/[\s,]+/).filter((word) => /^[1-9]\d*$/.test(word)))];
  const repeats = parseInt(form.elements.repeats.value, 10);
  const names = workers.flatMap((count) => repeats > 0
    ? Array.from({ length: Math.min(repeats, 1000) }, (_, index) => `${name}-${count}-r${index + 1}`)
    : [`${name}-${count}`]);
  let text = "";
  if (name && names.length) {
    const shown = names.length > 4 ? [...names.slice(0, 3), "...", names[names.length - 1]] : names;
    text = `${names.length} ${names.length === 1 ? "run" : "runs"}: ${shown.join(", ")}`;
  }
  document.getElementById("preview").textContent = text;
}

form.addEventListener("change", showOptions);
form.addEventListener("input", preview);
// A second click would start nothing, but it would show an error about names in use.
form.addEventListener("submit", () => setTimeout(() => { form.querySelector("button").disabled = true; }));
window.addEventListener("pageshow", () => { form.querySelector("button").disabled = false; });
showOptions();
preview();
