// The log of a run. Lines arrive with their numbers, so that none is shown twice and a gap is noticed and filled.
import { localDate, on, root } from "./app.js";

const log = document.getElementById("log");
const list = document.getElementById("log-lines");
const form = document.getElementById("log-filter");
const { rank, stream, search } = form.elements;
const follow = document.getElementById("follow");
const earlier = document.getElementById("log-earlier");
const model = document.getElementById("log-line").content.firstElementChild;
const id = Number(log.dataset.run);
const errors = new RegExp(log.dataset.errors);

const PAGE = 200;
const MOST_LINES = 5000; // more of them make a page slow
const MOST_TURNS = 5; // requests of at most about a second for a match, and for the number of matches
const END = Number.MAX_SAFE_INTEGER;

let previous = Number(log.dataset.previous); // number of the first line that was read
let next = Number(log.dataset.next); // number of the line after the last one that was read
let version = 0; // of the filter: answers to an older one come too late
let isReading = false;
let isBehind = false;
let isCutOff = false; // the last search ended at its limit of time
let matches = null;

function filter() {
  const given = [["rank", rank.value], ["stream", stream.value], ["search", search.value]];
  return given.filter(([, value]) => value !== "");
}

function isWanted(line) {
  return (rank.value === "" || rank.value === (line.rank === null ? "master" : String(line.rank)))
    && (stream.value === "" || stream.value === line.stream)
    && line.text.toLowerCase().includes(search.value.toLowerCase());
}

/** Read a page of the log; null if the filter has changed meanwhile or the master does not answer. */
async function read(range, filters = filter()) {
  const asked = version;
  const answer = await fetch(`${root}/api/runs/${id}/logs/?${new URLSearchParams([...filters, ...Object.entries(range)])}`)
    .then(async (response) => [response.ok, await response.json()])
    .catch(() => [false, { message: "The master does not answer." }]);
  if (asked !== version) return null;
  const [isGood, content] = answer;
  if (!isGood) tell(content.message);
  return isGood ? content : null;
}

// ---------------------------------------------------------------- lines

function setClock(clock) {
  if (!clock.dateTime) return;
  const { day, time, zone } = localDate(clock.dateTime);
  clock.textContent = time;
  clock.title = `${day} ${time} ${zone}`;
}

// The master does not know the zone of the browser.
list.querySelectorAll(".clock").forEach(setClock);
document.getElementById("log-zone").textContent = localDate(Date.now()).zone;

function row(line) {
  const made = model.cloneNode(true);
  made.dataset.line = line.line;
  made.dataset.stream = line.stream;
  const clock = made.querySelector(".clock");
  clock.dateTime = line.date;
  setClock(clock);
  const who = line.rank === null ? "master" : `rank ${line.rank}`;
  const isError = line.stream === "stderr" && errors.test(line.text);
  made.classList.toggle("bad", isError);
  made.querySelector(".who").textContent = isError ? `${who} err` : who;
  made.querySelector(".around").setAttribute("aria-label", `Show the lines around line ${line.line}`);
  mark(made.querySelector(".text"), line.text);
  return made;
}

/** Write a text with what was searched for marked in it. */
function mark(element, text) {
  const wanted = search.value.toLowerCase();
  const lower = text.toLowerCase();
  element.textContent = "";
  let from = 0;
  // Lower case may be longer, and then its places are not those of the text.
  while (wanted && lower.length === text.length) {
    const at = lower.indexOf(wanted, from);
    if (at < 0) break;
    const found = document.createElement("mark");
    found.textContent = text.slice(at, at + wanted.length);
    element.append(text.slice(from, at), found);
    from = at + wanted.length;
  }
  element.append(text.slice(from));
}

const isAtEnd = () => log.scrollTop + log.clientHeight >= log.scrollHeight - 5;
function toEnd() { log.scrollTop = log.scrollHeight; }

function append(lines) {
  const wasAtEnd = isAtEnd();
  list.append(...lines.slice(-MOST_LINES).map(row));
  if (wasAtEnd) {
    const tooMany = [...list.children].slice(0, Math.max(0, list.childElementCount - MOST_LINES));
    for (const old of tooMany) old.remove();
    if (tooMany.length) previous = Number(list.firstElementChild.dataset.line);
    toEnd();
  }
  if (matches !== null) matches.count += lines.length;
  tellState();
}

// ---------------------------------------------------------------- what the reader is told

function tell(text) {
  const status = document.getElementById("log-status");
  if (status.textContent !== text) status.textContent = text;
}

function tellState() {
  log.classList.toggle("searched", search.value !== "");
  const empty = document.getElementById("log-empty");
  empty.textContent = filter().length === 0 ? empty.dataset.text : "No such line.";
  empty.hidden = list.childElementCount > 0 || previous > 0;
  earlier.hidden = previous === 0;
  if (!isCutOff) earlier.textContent = search.value ? "Earlier matches" : "Earlier lines";
  else earlier.textContent = `Searched back to line ${previous.toLocaleString("en")}: continue`;
  if (matches === null) { tell(""); return; }
  const count = `${matches.count.toLocaleString("en")} ${matches.count === 1 ? "match" : "matches"}`;
  tell(matches.before === 0 ? count : `${count}, counted back to line ${matches.before.toLocaleString("en")}`);
}

/** Count the matches in the whole log, as far as a few requests get. */
async function count() {
  const counted = { count: 0, before: next };
  matches = counted; // lines that arrive from now on are added
  for (let turn = 0; turn < MOST_TURNS && counted.before > 0; turn += 1) {
    const answer = await read({ before_line: counted.before, limit: 0 });
    if (answer === null) return;
    counted.count += answer.matches;
    counted.before = answer.previous;
    tellState();
  }
}

// ---------------------------------------------------------------- reading

const isCut = (answer) => answer.previous > 0 && answer.lines.length < PAGE && filter().length > 0;

/** Show the last lines that pass the filter. */
async function show() {
  version += 1;
  matches = null;
  isBehind = false;
  isReading = true;
  document.getElementById("log-download").href =
    `${root}/api/runs/${id}/logs/?${new URLSearchParams([...filter(), ["format", "text"]])}`;
  const mine = version;
  const answer = await read({ before_line: END, limit: PAGE });
  if (mine !== version) return;
  isReading = false;
  if (answer === null) return;
  ({ previous, next } = answer);
  list.replaceChildren(...answer.lines.map(row));
  isCutOff = isCut(answer);
  tellState();
  toEnd();
  for (let turn = 1; turn < MOST_TURNS && isCutOff && !list.hasChildNodes() && mine === version; turn += 1) {
    await showEarlier();
  }
  if (search.value && mine === version) await count();
  if (isBehind) catchUp();
}

async function showEarlier() {
  const asked = previous;
  const answer = await read({ before_line: asked, limit: PAGE });
  if (answer === null || previous !== asked) return; // a second click, for example
  const fromEnd = log.scrollHeight - log.scrollTop;
  previous = answer.previous;
  list.prepend(...answer.lines.map(row));
  isCutOff = isCut(answer);
  tellState();
  log.scrollTop = log.scrollHeight - fromEnd;
}

// A reader of older lines in a long list is not disturbed by new ones, whatever their number.
const isPaused = () => !follow.checked || (list.childElementCount > MOST_LINES && !isAtEnd());

/** Read what was missed. If that is too much, the page goes on with the last lines. */
async function catchUp() {
  if (isReading || isPaused()) { isBehind = true; return; }
  isReading = true;
  isBehind = false;
  const mine = version;
  const answer = await read({ since_line: next, before_line: END, limit: 2 * PAGE });
  if (mine !== version) return; // show() reads
  isReading = false;
  if (answer === null) return;
  if (answer.previous > next) {
    list.replaceChildren();
    previous = answer.previous;
  }
  next = answer.next;
  append(answer.lines);
  if (isBehind) catchUp();
}

let waiting = [];
function takeWaiting() {
  const lines = waiting;
  waiting = [];
  if (isReading || isPaused()) { isBehind = true; return; }
  const found = [];
  let hasGap = false;
  for (const line of lines) {
    if (line.line < next) continue; // the page had it already
    hasGap = line.line > next;
    if (hasGap) break;
    next += 1;
    if (isWanted(line)) found.push(line);
  }
  if (found.length) append(found);
  if (hasGap) catchUp();
}

/** Show the lines around one, whether they contain what was searched for or not. */
async function showAround(line) {
  const number = Number(line.dataset.line);
  const filters = filter().filter(([name]) => name !== "search");
  const parts = await Promise.all([
    read({ before_line: number, limit: 5 }, filters), read({ since_line: number + 1, limit: 5 }, filters),
  ]);
  if (parts.includes(null)) return;
  for (const found of parts.flatMap((part) => part.lines)) {
    const after = [...list.children].find((other) => Number(other.dataset.line) >= found.line);
    if (after && Number(after.dataset.line) === found.line) continue;
    const made = row(found);
    made.classList.add("context");
    list.insertBefore(made, after || null);
  }
}

// A fast log has thousands of lines a second, and to measure the page for each of them would be slow.
on("log", (data) => { if (data.run_id === id && waiting.push(data) === 1) setTimeout(takeWaiting, 100); });
on("open", catchUp);
on("lost", catchUp);
on("state", (data) => { if (data.id === id) catchUp(); });

let typing = 0;
form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
form.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { if (form.checkValidity()) show(); }, 300);
});
earlier.addEventListener("click", (event) => { event.preventDefault(); showEarlier(); });
follow.addEventListener("change", () => { if (follow.checked) { toEnd(); catchUp(); } });
log.addEventListener("scroll", () => { if (isBehind && isAtEnd()) catchUp(); });
list.addEventListener("click", (event) => {
  const button = event.target.closest(".around");
  if (button) showAround(button.closest(".line"));
});

document.getElementById("follow-label").hidden = false;
for (const text of list.querySelectorAll(".text")) mark(text, text.textContent);
tellState();
toEnd();
if (search.value) count();
