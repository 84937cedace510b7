"use strict";
// Keeps the pages current. Whatever comes from the master goes in as text, never as HTML.
(() => {
  const state = document.getElementById("state");
  const id = state && Number(state.dataset.run);
  const source = new EventSource("/api/events/");
  const on = (kind, action) => source.addEventListener(kind, (event) => action(JSON.parse(event.data)));

  on("state", (data) => {
    if (state) {
      if (data.id === id) state.textContent = data.state;
      return;
    }
    const row = document.querySelector(`#runs tr[data-run="${Number(data.id)}"]`);
    if (row) row.cells[1].textContent = data.state;
    else location.reload();
  });
  on("deleted", (data) => {
    const row = document.querySelector(`#runs tr[data-run="${Number(data.id)}"]`);
    if (row) row.remove();
  });
  if (!state) return;

  const rows = new Map();
  for (const row of document.querySelectorAll("#metrics tbody tr")) rows.set(row.cells[0].textContent, row);
  on("metric", (data) => {
    if (data.run_id !== id) return;
    let row = rows.get(data.name);
    if (!row) {
      row = document.querySelector("#metrics tbody").insertRow();
      for (let i = 0; i < 3; i++) row.insertCell();
      rows.set(data.name, row);
    }
    [data.name, data.value, data.date].forEach((text, i) => { row.cells[i].textContent = text; });
  });
  const log = document.getElementById("log");
  on("log", (data) => {
    if (data.run_id !== id) return;
    const who = data.rank === null ? "master" : `rank ${data.rank}`;
    log.append(`\n${data.date} ${who.padStart(7)} | ${data.text}`);
    log.scrollTop = log.scrollHeight;
  });
  for (const button of document.querySelectorAll("button[data-action]")) {
    button.addEventListener("click", async () => {
      const action = button.dataset.action;
      if (!confirm(`Really ${action} this run?`)) return;
      if (action === "delete") await fetch(`/api/runs/${id}/`, { method: "DELETE" });
      else await fetch(`/api/runs/${id}/stop/`, { method: "POST" });
      location.href = action === "delete" ? "/" : location.href;
    });
  }
})();
