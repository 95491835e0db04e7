// Shows the state that the server sends once a second. Text from the job is only ever set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const bytes = (n) => {
  if (n === undefined || n === null) return "";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000 || unit === "GB") return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1000;
  }
};
const rate = (n) => (n === undefined ? "" : n >= 100 ? Math.round(n).toLocaleString("en") : String(Math.round(n * 10) / 10));
const time = (s) => {
  if (s === null || s === undefined || s === 0) return "–";
  if (s < 1e-3) return `${Math.round(s * 1e6)} µs`;
  return s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
};

const compact = (n) => (n >= 1e6 ? `${+(n / 1e6).toPrecision(3)}M` : n >= 1e4 ? `${+(n / 1e3).toPrecision(3)}k` : String(+n.toPrecision(3)));

// --- charts ---

let charts = null;

function chart(id, series) {
  const axis = () => ({ stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui" });
  const box = $(id);
  const options = {
    width: box.clientWidth || 300,
    height: 150,
    cursor: { drag: { x: false, y: false } },
    legend: { show: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1e-9)] } },
    axes: [{ ...axis(), space: 90, values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB")) }, { ...axis(), size: 52, values: (_, ticks) => ticks.map(compact) }],
    series: [{}, ...series.map(([label, tone]) => ({ label, stroke: color(tone), width: 2, points: { show: false }, fill: series.length === 1 ? color(tone) + "22" : undefined }))],
  };
  return new uPlot(options, [[], ...series.map(() => [])], box);
}

function makeCharts() {
  for (const id of ["chart-calls", "chart-latency", "chart-bytes"]) $(id).replaceChildren();
  charts = {
    calls: chart("chart-calls", [["calls", "--blue"]]),
    latency: chart("chart-latency", [["p50", "--green"], ["p99", "--red"]]),
    bytes: chart("chart-bytes", [["MB", "--violet"]]),
  };
}

function showCharts(history) {
  if (!charts) makeCharts();
  const [when, calls, sent, p50, p99] = history;
  charts.calls.setData([when, calls]);
  charts.latency.setData([when, p50, p99]);
  charts.bytes.setData([when, sent.map((n) => n / 1e6)]);
}

let latest = null;
const redraw = () => {
  if (!latest) return;
  makeCharts();
  show(latest);
};
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// --- tables ---

function table(id, heads, rows, nothing) {
  const body = [];
  const head = make("tr");
  heads.forEach(([title, , className]) => head.append(make("th", className, title)));
  rows.forEach((row) => {
    const line = make("tr");
    heads.forEach(([, value, className]) => line.append(make("td", className, value(row))));
    body.push(line);
  });
  const element = $(id);
  element.replaceChildren();
  if (!rows.length) {
    const line = make("tr");
    line.append(make("td", "none", nothing));
    element.append(line);
  } else {
    element.append(head, ...body);
  }
}

const none = (box, text) => box.replaceChildren(make("p", "none", text));

// --- parts of the page ---

function showWorkers(workers) {
  const box = $("workers");
  const many = workers.length > 24;
  box.classList.toggle("many", many);
  const ordered = many ? [...workers].sort((a, b) => (a.state === "up") - (b.state === "up") || a.id - b.id) : workers;
  box.replaceChildren(
    ...ordered.map((worker) => {
      const card = make("div", `worker ${worker.state}`);
      card.dataset.name = worker.name;
      card.append(make("span", "tag", worker.state), make("b", "", worker.name));
      if (worker.state !== "up") {
        card.append(make("div", "numbers", worker.state === "dead" ? "gone" : "does not answer"));
        return card;
      }
      card.title = `process ${worker.pid} on ${worker.host}, ${worker.threads} threads`;
      card.append(make("div", "numbers", many ? `${rate(worker.calls + worker.served)}/s` : `${rate(worker.calls)} calls/s, serves ${rate(worker.served)}/s`));
      card.append(make("div", "numbers extra", `${worker.in_flight} in flight, ${worker.serving} served now`));
      card.append(make("div", "numbers extra", `${bytes(worker.memory)}, owns ${bytes(worker.owned_bytes)}, ${worker.contexts} contexts`));
      return card;
    }),
  );
  const up = workers.filter((worker) => worker.state === "up").length;
  $("worker-count").textContent = `${up} of ${workers.length} up`;
}

function showAlarms(state) {
  const lines = [];
  for (const text of state.deadlocks) lines.push(["Deadlock: ", text]);
  const dead = state.workers.filter((worker) => worker.state === "dead").map((worker) => worker.name);
  if (dead.length) lines.push([dead.length === 1 ? "Dead: " : `${dead.length} dead: `, dead.slice(0, 12).join(", ")]);
  const silent = state.workers.filter((worker) => worker.state === "silent").map((worker) => worker.name);
  if (silent.length) lines.push(["No answer: ", silent.slice(0, 12).join(", ")]);
  const box = $("alarms");
  box.hidden = !lines.length;
  box.replaceChildren(
    ...lines.map(([title, text]) => {
      const line = make("p");
      line.append(make("b", "", title), text);
      return line;
    }),
  );
}

function showWaits(state) {
  const list = $("explanation");
  list.replaceChildren(...state.explanation.map((text) => make("li", "", text)));
  const box = $("wait-graph");
  const edges = new Map();
  for (const wait of state.waits) {
    const key = `${wait.worker}\n${wait.waits_for}`;
    const known = edges.get(key);
    edges.set(key, { from: wait.worker, to: wait.waits_for, count: (known ? known.count : 0) + 1, stuck: wait.stuck || Boolean(known && known.stuck) });
  }
  const names = [...new Set([...edges.values()].flatMap((edge) => [edge.from, edge.to]))];
  if (!names.length) return none(box, "Nobody waits.");
  if (names.length > 40) return none(box, `${edges.size} pairs of workers wait; the first are below.`);
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const width = 560;
  const flat = names.length <= 2;
  const height = flat ? 110 : Math.min(440, 170 + 14 * names.length);
  const radius = height / 2 - 34;
  const place = new Map(
    names.map((name, i) => {
      if (flat) return [name, [names.length === 1 ? width / 2 : i ? width - 120 : 120, height / 2]];
      const angle = (2 * Math.PI * i) / names.length - Math.PI / 2;
      return [name, [width / 2 + 1.5 * radius * Math.cos(angle), height / 2 + radius * Math.sin(angle)]];
    }),
  );
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "who waits for whom" });
  for (const kind of ["edge", "stuck"]) {
    const marker = svg("marker", { id: `head-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
    marker.append(svg("path", { d: "M0 0L8 4L0 8z", fill: kind === "stuck" ? "var(--red)" : "var(--soft)" }));
    picture.append(marker);
  }
  for (const edge of edges.values()) {
    const [x1, y1] = place.get(edge.from);
    const [x2, y2] = place.get(edge.to);
    const kind = edge.stuck ? "stuck" : "edge";
    const length = Math.hypot(x2 - x1, y2 - y1);
    let d;
    if (!length) {
      d = `M${x1 - 10} ${y1 - 20}C${x1 - 40} ${y1 - 60} ${x1 + 40} ${y1 - 60} ${x1 + 10} ${y1 - 22}`;
    } else {
      const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
      const bend = 22; // so that two that wait for each other have an arrow each
      const [cx, cy] = [(x1 + x2) / 2 - uy * bend, (y1 + y2) / 2 + ux * bend];
      d = `M${x1 + ux * 24} ${y1 + uy * 24}Q${cx} ${cy} ${x2 - ux * 26} ${y2 - uy * 26}`;
    }
    picture.append(svg("path", { d, class: `edge ${edge.stuck ? "stuck" : ""}`, "marker-end": `url(#head-${kind})` }));
  }
  for (const [name, [x, y]] of place) {
    picture.append(svg("circle", { cx: x, cy: y, r: 21, class: "node" }));
    const label = svg("text", { x, y: y + 4, "text-anchor": "middle" });
    label.textContent = name.length > 6 ? name.replace(/^worker/, "w") : name;
    const title = svg("title", {});
    title.textContent = name;
    label.append(title);
    picture.append(label);
  }
  box.replaceChildren(picture);
}

function showPasses(passes) {
  const box = $("passes");
  if (!passes.length) return none(box, "None runs now.");
  box.replaceChildren(
    ...passes.map((pass) => {
      const block = make("div", "pass");
      block.append(make("div", "", `context ${pass.context}, begun by ${pass.root}`));
      const parts = make("div", "parts");
      for (const part of pass.parts) {
        const waits = part.waits_for.length;
        parts.append(make("span", `part ${waits ? "waits" : ""}`, waits ? `${part.worker} waits for ${part.waits_for.join(", ")}` : `${part.worker} has heard all and runs`));
      }
      block.append(parts);
      return block;
    }),
  );
}

function showRecent(recent) {
  const box = $("recent");
  if (!recent.length) return none(box, "None.");
  box.replaceChildren(
    ...recent.slice(0, 12).map((event) => {
      const line = make("div", `event ${event.kind}`);
      line.append(make("time", "", new Date(event.time * 1000).toLocaleTimeString("en-GB")));
      line.append(make("span", "", `${event.text} (noticed by ${event.by.length > 3 ? `${event.by.length} workers` : event.by.join(", ")})`));
      return line;
    }),
  );
}

function showMatrix(matrix) {
  const canvas = $("matrix");
  $("matrix-box").hidden = matrix.size < 3 || !matrix.most;
  if (matrix.size < 3) return;
  const cells = atob(matrix.cells);
  canvas.width = canvas.height = matrix.size;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, matrix.size, matrix.size);
  const tone = color("--shade");
  for (let i = 0; i < cells.length; i++) {
    const strength = cells.charCodeAt(i);
    if (!strength) continue;
    context.fillStyle = `rgba(${tone}, ${0.15 + (0.85 * strength) / 255})`;
    context.fillRect(i % matrix.size, Math.floor(i / matrix.size), 1, 1);
  }
  canvas.title = `darkest: ${matrix.most} calls per second`;
}

function show(state) {
  latest = state;
  const totals = state.totals;
  document.title = state.deadlocks.length ? "Deadlock – Telegrad" : "Telegrad";
  $("summary").textContent = `${totals.up} of ${totals.workers} workers, ${rate(totals.calls)} calls/s, ` +
    (totals.p50 ? `${time(totals.p50)} median, ${time(totals.p99)} at p99, ` : "") + `${bytes(totals.bytes)}/s`;
  $("updated").textContent = `as of ${new Date(state.time * 1000).toLocaleTimeString("en-GB")}`;
  showAlarms(state);
  showCharts(state.history);
  showWorkers(state.workers);
  showWaits(state);
  showPasses(state.passes);
  showRecent(state.recent);
  showMatrix(state.matrix);
  table("links", [
    ["from", (l) => l.from, "text"], ["to", (l) => l.to, "text"], ["calls/s", (l) => rate(l.calls)], ["p50", (l) => time(l.p50)],
    ["p90", (l) => time(l.p90)], ["p99", (l) => time(l.p99)], ["sent/s", (l) => bytes(l.bytes)], ["in flight", (l) => l.in_flight], ["failed/s", (l) => l.failed || ""],
  ], state.links.slice(0, 20), "No calls yet.");
  table("references", [["owner", (r) => r.owner, "text"], ["held for", (r) => r.holder, "text"], ["tensors", (r) => bytes(r.bytes)]], state.references.slice(0, 15), "No references between workers.");
  table("contexts", [
    ["context", (c) => c.context, "text"], ["on", (c) => c.worker, "text"], ["opened by", (c) => c.opened_by, "text"], ["sends", (c) => c.sends],
    ["receives", (c) => c.receives], ["", (c) => (c.failed ? "failed" : "")],
  ], state.contexts.slice(0, 15), "None is open.");
  $("context-count").textContent = state.context_count ? String(state.context_count) : "";
  document.body.dataset.number = state.number;
}

const source = new EventSource("/events");
source.onmessage = (message) => show(JSON.parse(message.data));
source.onerror = () => {
  $("updated").textContent = "the job has ended, or its page has";
};
