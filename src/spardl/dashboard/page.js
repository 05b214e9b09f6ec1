// Draws a snapshot of a run. Whatever comes from the run is set as text, never as HTML.

const UNITS = {
  "bytes sent": bytes,
  "exchange seconds": seconds,
  "exposed seconds": seconds,
  "step seconds": seconds,
  density: percent,
};

const COLUMNS = [
  ["group", (g) => g.name],
  ["elements", (g) => g.elements.toLocaleString("en")],
  ["steps", (g) => String(g.steps)],
  ["density", (g) => percent(g.density)],
  ["sent", (g) => (g.steps ? bytes(g.bytes_sent / g.steps) : "-")],
  ["selecting", (g) => perStep(g, "seconds_selecting")],
  ["packing", (g) => perStep(g, "seconds_packing")],
  ["waiting", (g) => perStep(g, "seconds_waiting")],
  ["transferring", (g) => perStep(g, "seconds_transferring")],
];

function short(value) {
  const size = Math.abs(value);
  return size >= 1e5 || (size && size < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${short(value)} ${unit}`;
    value /= 1000;
  }
  return `${short(value)} TB`;
}

function seconds(value) {
  if (value >= 1) return `${short(value)} s`;
  return value >= 1e-3 ? `${short(1e3 * value)} ms` : `${short(1e6 * value)} us`;
}

function percent(share) {
  return `${+(100 * share).toPrecision(3)} %`;
}

function perStep(group, key) {
  return group.steps ? seconds(group[key] / group.steps) : "-";
}

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function draw(tag, values) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const key in values) element.setAttribute(key, values[key]);
  return element;
}

function fill(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
}

function card(name, value) {
  const element = make("div", name, "soft");
  element.prepend(make("b", value));
  return element;
}

// Where a value lies between two ends, in the middle if these are one.
function between(low, high, value) {
  return high > low ? (value - low) / (high - low) : 0.5;
}

function curve(name, points) {
  const [width, height, side, top, bottom] = [320, 120, 4, 6, 16];
  const show = UNITS[name] || short;
  const steps = points.map((point) => point[0]);
  const values = points.map((point) => point[1]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const path = points.map(([step, value]) => {
    const x = side + (width - 2 * side) * between(first, last, step);
    const y = height - bottom - (height - top - bottom) * between(low, high, value);
    return `${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  const floor = height - bottom;
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  picture.append(draw("line", { x1: side, x2: width - side, y1: floor, y2: floor }));
  picture.append(draw("path", { d: `M${path.join("L")}` }));
  const labels = [
    [`step ${first}`, side, height - 3, "start"],
    [String(last), width - side, height - 3, "end"],
  ];
  for (const [text, x, y, anchor] of labels) {
    const label = draw("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    picture.append(label);
  }
  const figure = make("figure");
  const caption = make("figcaption", `${name}: `);
  caption.append(make("b", show(values[values.length - 1])));
  if (high > low) caption.append(make("span", ` ${show(low)} to ${show(high)}`, "soft range"));
  figure.append(caption, picture);
  return figure;
}

function row(tag, cells) {
  const element = make("tr");
  element.append(...cells.map((cell) => make(tag, cell)));
  return element;
}

// Groups of the last step, each where it was exchanged between the first gradient and the commit.
function timeline(run) {
  const { spans, seconds: whole, step, of } = run.timeline;
  if (!spans || !spans.length) return make("span", "No step has been synchronised yet.", "soft");
  const [width, row, left, right, bottom] = [960, 18, 240, 60, 18];
  const height = row * spans.length + bottom;
  const at = (time) => left + ((width - left - right) * time) / (whole || 1);
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "groups of the last step" });
  const write = (text, x, y, anchor) => {
    const label = draw("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    picture.append(label);
  };
  spans.forEach(([name, begins, ends], index) => {
    const y = row * index;
    write(name.length > 38 ? `${name.slice(0, 37)}\u2026` : name, left - 8, y + 13, "end");
    picture.append(draw("line", { x1: left, x2: width - right, y1: y + row / 2, y2: y + row / 2 }));
    const bar = draw("rect", { x: at(begins), y: y + 3, width: Math.max(1, at(ends) - at(begins)), height: row - 6, rx: 2 });
    const hint = draw("title", {});
    hint.textContent = `${name}: ${seconds(begins)} to ${seconds(ends)}`;
    bar.append(hint);
    picture.append(bar);
    write(seconds(ends - begins), width - right + 8, y + 13, "start");
  });
  write(`step ${step} begins`, left, height - 4, "start");
  write(seconds(whole), width - right, height - 4, "end");
  const figure = make("figure");
  figure.append(picture);
  if (of > spans.length) figure.append(make("figcaption", `and ${of - spans.length} more`, "soft"));
  return figure;
}

function rankChip(run, rank) {
  const [state, words] = rankState(run, rank);
  const element = make("div");
  element.append(make("span", String(rank), state), make("small", words, state === "bad" ? "bad" : "soft"));
  return element;
}

function rankState(run, rank) {
  if (run.failure && run.failure.peer === rank) return ["bad", "is blamed"];
  if (run.ranks && run.ranks[rank]) return run.ranks[rank];
  return [run.failure || run.quiet_seconds === null ? "unknown" : "fine", ""];
}

function health(run, live) {
  if (run.failure) return make("span", run.failure.text, "bad");
  if (run.quiet_seconds === null) return make("span", "No step has been synchronised yet.", "soft");
  const ago = live ? `, ${seconds(run.quiet_seconds)} ago` : "";
  return make("span", `All ${run.workers} ranks took part in step ${run.steps - 1}${ago}.`, "soft");
}

function showRun(run, live) {
  const facts = Object.entries(run.facts).map(([name, value]) => `${name}: ${value}`);
  document.title = run.title;
  fill("title", make("h1", run.title));
  fill("facts", make("span", [...facts, `spardl ${run.version}`].join(" \u00b7 "), "soft"));
  fill(
    "cards",
    card("steps", String(run.steps)),
    card("ranks", String(run.workers)),
    card("sent by this rank", bytes(run.bytes_sent)),
    card("less than float32 of everything", run.bytes_sent ? `${short(run.dense_bytes / run.bytes_sent)}x` : "-"),
    card("steps refused, not finite", String(run.refused)),
  );
  const drawn = Object.entries(run.curves).filter(([, points]) => points.length);
  drawn.sort(([one], [other]) => (one in UNITS) - (other in UNITS)); // a script's own first
  fill("curves", ...drawn.map(([name, points]) => curve(name, points)));
  const ranks = Array.from({ length: Math.min(run.workers, 256) }, (_, rank) => rank);
  fill("ranks", ...ranks.map((rank) => rankChip(run, rank)));
  fill("health", health(run, live));
  fill("timeline", timeline(run));
  const rows = run.groups.map((group) => row("td", COLUMNS.map(([, show]) => show(group))));
  fill("groups", row("th", COLUMNS.map(([name]) => name)), ...rows);
}

async function follow() {
  let pause = 1000;
  try {
    const answer = await fetch("data.json");
    showRun(await answer.json(), true);
    fill("state", make("span", "live", "soft"));
  } catch {
    fill("state", make("span", "The run has ended, or cannot be reached; this is what was last seen.", "bad"));
    pause = 5000;
  }
  setTimeout(follow, pause);
}

const live = document.body.dataset.live === "yes";
showRun(JSON.parse(document.getElementById("data").textContent), live);
if (live) follow();
