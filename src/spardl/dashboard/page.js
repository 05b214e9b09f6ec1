// Draws a snapshot of a run. Whatever comes from the run is set as text, never as HTML.

const UNITS = {
  "bytes sent": bytes,
  "exchange seconds": seconds,
  "exposed seconds": seconds,
  "step seconds": seconds,
  density: percent,
};

// What curves are called on the page, where their names in the data need an explanation.
const NAMES = {
  "bytes sent": "sent per step",
  "exchange seconds": "one exchange",
  "exposed seconds": "waited for exchanges",
  "step seconds": "one step",
  density: "entries sent, of all",
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
  if (!value) return "0 s";
  if (value >= 1) return `${short(value)} s`;
  return value >= 1e-3 ? `${short(1e3 * value)} ms` : `${short(1e6 * value)} us`;
}

function percent(share) {
  return `${+(100 * share).toPrecision(3)} %`;
}

function times(ratio) {
  return ratio < 10 ? ratio.toFixed(1) : Math.round(ratio).toLocaleString("en");
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

// Numbers to write at an axis from low to high: three to five of them, at round distances.
function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let count = Math.ceil(low / distance - 1e-9); count * distance <= high * (1 + 1e-9); count++) {
    found.push(+(count * distance).toPrecision(6));
  }
  return found;
}

// Where the axis of these values begins and ends. Amounts begin at nothing. Few values that are far above all others
// do not flatten the rest: they leave the picture at the top.
function axis(name, values) {
  const sorted = [...values].sort((one, other) => one - other);
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (low >= 0 && (name in UNITS || low < 0.4 * high)) low = 0;
  const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
  if (name in UNITS && usual > 0 && high > 4 * usual) high = 1.5 * usual;
  if (high <= low) [low, high] = [Math.min(0, low), Math.max(0, low) || 1];
  return [low, high + 0.05 * (high - low)];
}

// The mean of each value's neighbours on both sides, for curves that are too ragged to see where they lead.
function smooth(values) {
  const reach = Math.floor(values.length / 40);
  let sum = 0;
  const sums = [0, ...values.map((value) => (sum += value))];
  return values.map((_, at) => {
    const near = Math.min(reach, at, values.length - 1 - at);
    return (sums[at + near + 1] - sums[at - near]) / (2 * near + 1);
  });
}

function curve(name, points) {
  const [width, height, left, right, top, bottom] = [340, 140, 56, 8, 8, 18];
  const show = UNITS[name] || short;
  const steps = points.map((point) => point[0]);
  const values = points.map((point) => point[1]);
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const [low, high] = axis(name, values);
  const across = (step) => left + (width - left - right) * (last > first ? (step - first) / (last - first) : 0.5);
  const up = (value) => height - bottom - (height - top - bottom) * ((Math.min(value, high) - low) / (high - low));
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  const write = (text, x, y, anchor) => {
    const label = draw("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    picture.append(label);
  };
  for (const tick of ticks(low, high)) {
    picture.append(draw("line", { x1: left, x2: width - right, y1: up(tick), y2: up(tick) }));
    write(show(tick), left - 6, up(tick) + 3.5, "end");
  }
  const trace = (heights, kind) => {
    const path = heights.map((value, at) => `${across(steps[at]).toFixed(1)} ${up(value).toFixed(1)}`);
    picture.append(draw("path", { d: `M${path.join("L")}`, class: kind }));
  };
  const ragged = points.length > 80;
  if (ragged) trace(values, "faint");
  trace(ragged ? smooth(values.map((value) => Math.min(value, high))) : values, "main");
  if (points.length === 1) picture.append(draw("circle", { cx: across(first), cy: up(values[0]), r: 2.5 }));
  write(`step ${first}`, left, height - 4, "start");
  if (last > first) write(String(last), width - right, height - 4, "end");
  const figure = make("figure");
  const caption = make("figcaption", `${NAMES[name] || name}: `);
  caption.append(make("b", show(values[values.length - 1])));
  const most = Math.max(...values);
  if (most > high) caption.append(make("span", ` (at most ${show(most)})`, "soft"));
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
  const width = Math.max(320, Math.min(960, document.getElementById("timeline").clientWidth));
  const [row, left, right, bottom] = [20, Math.min(240, 0.36 * width), 64, 20];
  const letters = Math.floor(left / 7);
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
    write(name.length > letters ? `${name.slice(0, letters - 1)}\u2026` : name, left - 8, y + 14, "end");
    picture.append(draw("line", { x1: left, x2: width - right, y1: y + row / 2, y2: y + row / 2 }));
    const bar = draw("rect", { x: at(begins), y: y + 3, width: Math.max(1, at(ends) - at(begins)), height: row - 6, rx: 2 });
    const hint = draw("title", {});
    hint.textContent = `${name}: ${seconds(begins)} to ${seconds(ends)}`;
    bar.append(hint);
    picture.append(bar);
    write(seconds(ends - begins), width - right + 8, y + 14, "start");
  });
  write(width < 600 ? "0" : `step ${step} begins`, left, height - 4, "start");
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
  return make("span", `All ${run.workers} ranks took part in the last step${ago}.`, "soft");
}

let shown = null;

function showRun(run, live) {
  shown = run;
  const facts = Object.entries(run.facts).map(([name, value]) => `${name}: ${value}`);
  document.title = run.title;
  fill("title", make("h1", run.title));
  fill("facts", make("span", [...facts, `spardl ${run.version}`].join(" \u00b7 "), "soft"));
  fill(
    "cards",
    card("steps", String(run.steps)),
    card("ranks", String(run.workers)),
    card("sent by this rank", bytes(run.bytes_sent)),
    card("fewer bytes than all of it in float32", run.bytes_sent ? `${times(run.dense_bytes / run.bytes_sent)}x` : "-"),
    card("steps left out (inf or NaN)", String(run.refused)),
  );
  const drawn = Object.entries(run.curves).filter(([, points]) => points.length);
  const place = ([name]) => (name in UNITS ? 2 : +!/loss|accuracy/.test(name)); // a script's own first, losses before all
  drawn.sort((one, other) => place(one) - place(other));
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

window.addEventListener("resize", () => shown && fill("timeline", timeline(shown)));
const live = document.body.dataset.live === "yes";
showRun(JSON.parse(document.getElementById("data").textContent), live);
if (live) follow();
