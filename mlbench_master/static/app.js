"use strict";
// Keeps a page current: it reads the page again when it may have missed something, and adds events in between.
// Text of events goes in as text, never as HTML; a page comes from the master's templates, which escape all text.
(() => {
  const run = document.getElementById("state");
  const id = run && Number(run.dataset.run);
  const live = document.getElementById("live");
  const MOST_LINES = 2000;

  // One reading at a time, and another one after it if something happened meanwhile.
  let reading = false;
  let again = false;
  async function refresh() {
    again = true;
    if (reading) return;
    reading = true;
    while (again) {
      again = false;
      try {
        const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
        if (answer.status === 404) { location.href = "/"; return; }
        if (!answer.ok) throw new Error(answer.status);
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (!fresh.querySelector("[data-live]")) { location.reload(); return; } // the login page
        for (const part of fresh.querySelectorAll("[data-live]")) document.getElementById(part.id).replaceWith(part);
        toEnd();
      } catch {
        again = true; // the master is away
      }
      // Many events in a short time cause one reading.
      await new Promise((resume) => setTimeout(resume, again ? 2000 : 300));
    }
    reading = false;
  }

  function toEnd() {
    const log = document.getElementById("log");
    if (log) log.scrollTop = log.scrollHeight;
  }

  const actions = {
    open: () => { live.textContent = ""; refresh(); },
    closed: () => { live.textContent = "No live updates: the master does not answer. Trying again."; },
    lost: refresh,
    deleted: (data) => { if (!run || data.id === id) refresh(); },
    state: (data) => { if (!run || data.id === id) refresh(); },
    metric: (data) => {
      // These change the record of the run, or its links.
      if (["goal @ 0", "result @ 0"].includes(data.name) && (!run || data.run_id === id)) refresh();
      if (!run || data.run_id !== id) return;
      const body = document.querySelector("#metrics tbody");
      let row = [...body.rows].find((row) => row.dataset.name === data.name);
      if (!row) {
        const empty = body.querySelector(".empty");
        if (empty) empty.remove();
        row = body.insertRow();
        row.dataset.name = data.name;
        const name = document.createElement("th");
        name.scope = "row";
        name.textContent = data.name;
        row.append(name);
        row.insertCell();
        row.insertCell();
      } else if (row.cells[2].textContent > data.date) return; // a late delivery
      row.cells[1].textContent = data.value;
      row.cells[2].textContent = data.date;
    },
    log: (data) => {
      if (!run || data.run_id !== id) return;
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
    },
  };

  if (window.SharedWorker) {
    new BroadcastChannel("mlbench-events").onmessage = (event) => {
      for (const [kind, data] of event.data) actions[kind](data);
    };
    new SharedWorker("/static/events.js").port.onmessage = actions.open;
  } else {
    // Some browsers of phones have no shared workers; they show few pages at a time.
    const source = new EventSource("/api/events/");
    source.onopen = actions.open;
    source.onerror = actions.closed;
    for (const kind of ["state", "metric", "log", "deleted", "lost"]) {
      source.addEventListener(kind, (event) => actions[kind](JSON.parse(event.data)));
    }
  }
  toEnd();
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
