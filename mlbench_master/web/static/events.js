"use strict";
// A shared worker with the one event stream of all pages of this browser. A stream holds a connection, and HTTP/1.1
// allows six of them to a server: with a stream per page, the seventh page would hang.
const root = new URL("..", self.location);
// With the path of the master, because a proxy may serve several masters.
const channel = new BroadcastChannel(`mlbench-events ${root.pathname}`);
let batch = [];
let isOpen = false;

// A bulk of metrics is thousands of events, and a message to the pages costs more than an event.
function send(kind, data) {
  if (batch.push([kind, data]) === 1) setTimeout(() => { channel.postMessage(batch); batch = []; }, 100);
}

function connect() {
  const source = new EventSource(new URL("api/events/", root));
  source.onopen = () => { isOpen = true; send("open"); };
  source.onerror = () => {
    isOpen = false;
    send("closed");
    // A browser repeats a connection that broke off, but not one that the master has refused.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
  };
  for (const kind of ["state", "metric", "log", "deleted", "lost"]) {
    source.addEventListener(kind, (event) => send(kind, JSON.parse(event.data)));
  }
}
connect();
// A page that joins later reads itself again, since it may have missed an event before it joined.
self.onconnect = (event) => { if (isOpen) event.ports[0].postMessage("open"); };
