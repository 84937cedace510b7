// What every page needs: the events of the master, live parts that are read again, and the ages of dates.
//
// Text of events goes into a page as text, never as HTML. Pages come from the master's templates, which escape all text.

/** The path of the master: empty, or the path under which a proxy serves it. Scripts are in its folder static. */
export const root = new URL("..", import.meta.url).pathname.slice(0, -1);

const live = document.getElementById("live");
const listeners = { open: [], closed: [], lost: [], deleted: [], state: [], metric: [], log: [] };

let isLeaving = false;
addEventListener("pageshow", () => { isLeaving = false; }); // also after the user has come back

/** Go to another page. Several signs of a deletion ask for it, and a second navigation would abort the first. */
export function leaveFor(address) {
  if (isLeaving) return;
  isLeaving = true;
  location.href = address;
}

/** Call a function with the data of every event of a kind: open, closed, lost, deleted, state, metric or log. */
export function on(kind, listener) {
  listeners[kind].push(listener);
}

// One reading at a time, and another one after it if something happened meanwhile.
let reading = false;
let again = false;
let giveUp = () => {};

/**
 * Read the page again and replace its parts with the attribute data-live, which need an id.
 * Afterwards, the event "refreshed" goes to the document.
 */
export async function refresh() {
  again = true;
  if (reading) return;
  reading = true;
  while (again) {
    again = false;
    const parts = [...document.querySelectorAll("[data-live]")];
    if (parts.length) {
      giveFocusBack = () => {};
      const selectOOB = parts.map((part) => `#${part.id}`).join(",");
      const failure = new Promise((resume) => { giveUp = resume; });
      const answer = htmx.ajax("GET", location.href, { source: "#main", target: "#main", swap: "none", selectOOB });
      await Promise.race([answer.catch(() => {}), failure]);
      giveFocusBack();
      document.dispatchEvent(new Event("refreshed"));
      tellAges();
    }
    // Many events in a short time cause one reading.
    await new Promise((resume) => setTimeout(resume, again ? 2000 : 300));
  }
  reading = false;
}

// A part that has not changed stays as it is: a click on a link is lost when the link is replaced between the press and
// the release of the button, and so is a selection of text.
document.addEventListener("htmx:oobBeforeSwap", ({ detail }) => {
  detail.shouldSwap = !detail.fragment.firstElementChild.isEqualNode(detail.target);
});

// htmx gives the focus back to an element with an id. The links of lists have none, and a user of the keyboard would
// have to start at the top of the page after each update.
let giveFocusBack = () => {};
document.addEventListener("htmx:beforeSwap", () => {
  const focused = document.activeElement;
  const part = focused.closest("[data-live]")?.id;
  if (!part || focused.id) return;
  const equal = () => [...document.querySelectorAll(`#${part} ${focused.localName}`)]
    .filter((one) => one.outerHTML === focused.outerHTML);
  const place = equal().indexOf(focused);
  giveFocusBack = () => { if (!focused.isConnected) equal()[place]?.focus({ preventScroll: true }); };
});

document.addEventListener("htmx:sendError", () => { again = true; }); // the master is away
// The promise of htmx stays open if an answer cannot be shown, and a request without a limit may stay open, too.
document.addEventListener("htmx:onLoadError", () => { again = true; giveUp(); });
document.addEventListener("htmx:timeout", () => { again = true; });
document.addEventListener("htmx:responseError", (event) => {
  const { status } = event.detail.xhr;
  if (status === 401) location.reload(); // to the login page
  else if (status === 404 && event.detail.target.id === "main") leaveFor(`${root}/runs/`);
  else again = status >= 500;
});

on("open", () => { live.textContent = ""; refresh(); });
on("closed", () => { live.textContent = "No live updates: the master does not answer. Trying again."; });
on("lost", refresh);

function receive(kind, data) {
  for (const listener of listeners[kind]) listener(data);
}

if (window.SharedWorker) {
  new BroadcastChannel(`mlbench-events ${root}/`).onmessage = (event) => {
    for (const [kind, data] of event.data) receive(kind, data);
  };
  new SharedWorker(`${root}/static/events.js`).port.onmessage = () => receive("open");
} else {
  // Some browsers of phones have no shared workers; they show few pages at a time.
  const source = new EventSource(`${root}/api/events/`);
  source.onopen = () => receive("open");
  source.onerror = () => receive("closed");
  for (const kind of ["state", "metric", "log", "deleted", "lost"]) {
    source.addEventListener(kind, (event) => receive(kind, JSON.parse(event.data)));
  }
}

/** Return the age of a date as mlbench_master/web/render.py writes it. */
function age(date) {
  const seconds = Math.floor((Date.now() - date) / 1000);
  if (seconds < 1) return "now";
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([unit]) => seconds >= unit);
  return `${Math.floor(seconds / unit)} ${name} ago`;
}

/** Return the parts of a date in the zone of the browser: day, time of the day, and name of the zone. */
export function localDate(date) {
  const given = new Date(date);
  const two = (value) => String(value).padStart(2, "0");
  const names = new Intl.DateTimeFormat("en", { timeZoneName: "short" }).formatToParts(given);
  return {
    day: [given.getFullYear(), two(given.getMonth() + 1), two(given.getDate())].join("-"),
    time: [given.getHours(), given.getMinutes(), given.getSeconds()].map(two).join(":"),
    zone: names.find(({ type }) => type === "timeZoneName").value,
  };
}

function tellAges() {
  for (const one of document.querySelectorAll("time[datetime]:not(.clock)")) {
    const { day, time, zone } = localDate(one.dateTime);
    const exact = `${day} ${time} ${zone}`;
    const isExact = one.classList.contains("exact");
    if (!isExact && one.title !== exact) one.title = exact;
    const text = isExact ? exact : age(new Date(one.dateTime));
    if (one.textContent !== text) one.textContent = text;
  }
}
tellAges();
setInterval(tellAges, 5000);

// Buttons of the API: data-post or data-delete is the address, data-confirm the question, data-then the next page.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-post], button[data-delete]");
  if (!button || (button.dataset.confirm && !confirm(button.dataset.confirm))) return;
  button.disabled = true;
  const method = button.dataset.post ? "POST" : "DELETE";
  let problem = "";
  try {
    const answer = await fetch(button.dataset.post || button.dataset.delete, { method });
    if (!answer.ok && answer.status !== 404) problem = (await answer.json()).message;
  } catch {
    problem = "The master does not answer.";
  }
  button.disabled = false;
  live.textContent = problem;
  if (problem) return;
  if (button.dataset.then) leaveFor(button.dataset.then);
  else refresh();
});
