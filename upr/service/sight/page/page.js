"use strict";
// The page of a server. It asks the feed once a second, and keeps what it saw, within bounds, until it is closed.

const PARTITIONS = 1024;
const POLL_MS = 1000;
const HIDDEN_MS = 5000;
const ANSWER_MS = 5000;
const POINTS_MAX = 1200; // Of each history; then every second of the older half goes.
const EVENTS_MAX = 100;
const STATES = ["", "active", "replica", "pending", "dead"];
const DEAD = 4;
const TOKEN = "upr-token";
const REFUSED = "upr-refused";

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

let kept = null;
try {
  kept = sessionStorage;
} catch {
  // The browser lets no page keep anything: the token is forgotten at a reload.
}

// What is known now.
let token = kept?.getItem(TOKEN) ?? "";
let status = null;
let bucket = null;
let partition = null;
let consumer = null;
let chosenConsumer = "";
let cursor = 0;
let asked = null;
let answeredAt = 0;
let lost = false;
let timer = 0;
let round = 0;
let rates = new Float64Array(PARTITIONS);
let flows = { written: null, sent: null, commit: null };
const histories = new Map();
const loads = { written: [], sent: [] };

// Words and numbers

function count(number) {
  return Math.abs(number) < 100000 ? whole.format(number) : short.format(number);
}

function perSecond(number) {
  return number > 0 && number < 9.95 ? number.toFixed(1) : count(Math.round(number));
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit++;
  }
  return `${unit && number < 10 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 1) return seconds === 0 ? "0 s" : `${seconds < 0.01 ? (seconds * 1000).toFixed(1) : Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function some(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// Elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function drawing(name, attributes = {}, words) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

function say(target, words, kind = "") {
  if (target.textContent !== words) target.textContent = words;
  target.classList.remove("good", "bad");
  if (kind) target.classList.add(kind);
  target.hidden = words === "";
}

// Rows are kept by key, so that what has the focus keeps it.
function rows(body, items, key, make, fill) {
  const there = new Map([...body.children].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let row = there.get(name);
    if (row) there.delete(name);
    else {
      row = make(item);
      row.dataset.key = name;
    }
    fill(row, item);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  for (const row of there.values()) row.remove();
}

function cells(row, ...values) {
  values.forEach((value, index) => {
    const cell = row.children[index];
    if (value !== null && cell.textContent !== value) cell.textContent = value;
    if (value !== null) cell.title = value.length > 24 ? value : "";
  });
}

function emptyRow(...classes) {
  return element("tr", {}, ...classes.map((name) => element("td", name ? { class: name } : {})));
}

function facts(list, pairs) {
  const flat = pairs.flat();
  if (list.children.length !== flat.length) {
    list.replaceChildren(...pairs.flatMap(() => [element("dt"), element("dd")]));
  }
  flat.forEach((words, index) => {
    if (list.children[index].textContent !== words) list.children[index].textContent = words;
    if (index % 2) list.children[index].title = words;
  });
}

// Asking

class Refused extends Error {
  constructor(code, words) {
    super(words);
    this.code = code;
  }
}

async function ask(path, fields = {}) {
  const answer = await fetch(`api/${path}?${new URLSearchParams(fields)}`, {
    headers: token ? { Authorization: `Bearer ${token}` } : {},
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(ANSWER_MS),
  });
  if (answer.ok) return answer.json();
  let words = `the server answered ${answer.status}`;
  try {
    const problem = await answer.json();
    words = problem.message + (problem.hint ? ` (${problem.hint})` : "");
  } catch {
    // The words of a 401 say no more than its number.
  }
  throw new Refused(answer.status, words);
}

// A poll that is begun while another waits for its answers takes its place: what the older one hears is left out.
async function poll() {
  const mine = ++round;
  clearTimeout(timer);
  const began = performance.now();
  try {
    const next = await ask("status");
    if (mine !== round) return;
    takeStatus(next);
    if ($("bucket").value) await pollBucket($("bucket").value, mine);
    if (mine !== round) return;
    answeredAt = Date.now();
    if (lost) happened("The server answers again.");
    lost = false;
    alert_("away", "");
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof Refused && error.code === 401) return signIn(token !== "");
    const words = error instanceof Refused ? sentence(error.message) : "The server does not answer.";
    alert_("away", words);
    if (!lost && status) happened(words);
    lost = true;
  }
  const wait = document.hidden ? HIDDEN_MS : POLL_MS;
  timer = setTimeout(poll, Math.max(wait - (performance.now() - began), 50));
  render();
}

async function pollBucket(name, mine) {
  const about = { bucket: name };
  try {
    const [newest, place, reader] = await Promise.all([
      ask("bucket", about),
      ask("partition", { ...about, partition: cursor }),
      chosenConsumer ? ask("consumer", { ...about, name: chosenConsumer }).catch((error) => gone(error, mine)) : null,
    ]);
    if (mine !== round) return;
    alert_("bucket", "");
    if (place.partition === cursor) partition = place;
    consumer = reader;
    takeBucket(newest);
  } catch (error) {
    if (mine !== round) return;
    if (!(error instanceof Refused) || error.code === 401) throw error;
    // The server answers, but not about this bucket: nothing older stands in for it.
    bucket = partition = consumer = null;
    const isKnown = status.buckets.some((one) => one.name === name && one.problem);
    alert_("bucket", isKnown ? "" : error.message);
  }
}

function gone(error, mine) {
  if (!(error instanceof Refused && error.code === 404)) throw error;
  if (mine === round) chosenConsumer = "";
  return null;
}

// Signing in

function signIn(wasRefused) {
  token = "";
  kept?.removeItem(TOKEN);
  round++;
  clearTimeout(timer);
  if (status) {
    // What one token showed is gone before the next: no answer on its way, no event and no name of a bucket stays.
    if (wasRefused) kept?.setItem(REFUSED, "yes");
    return location.replace(location.pathname);
  }
  $("alerts").replaceChildren();
  $("sign-in").hidden = false;
  const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  $("plain").hidden = location.protocol === "https:" || local;
  refused(wasRefused || kept?.getItem(REFUSED));
  kept?.removeItem(REFUSED);
  $("token").focus();
}

function refused(isRefused) {
  say($("refused"), isRefused ? "The server refuses this token. It is unknown, or has neither the role read nor admin." : "", "bad");
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const shown = $("token").value.trim();
  $("token").value = "";
  // No header takes another character, and no token has one.
  if (/[^!-~]/.test(shown)) return refused(true);
  token = shown;
  kept?.setItem(TOKEN, token);
  poll();
});
$("leave").addEventListener("click", () => signIn(false));

// Taking over what the server says

function happened(words) {
  const now = new Date();
  const clock = element("time", { datetime: now.toISOString() }, now.toLocaleTimeString("en-GB"));
  $("events").prepend(element("li", {}, clock, element("span", {}, words)));
  while ($("events").children.length > EVENTS_MAX) $("events").lastChild.remove();
}

function alert_(key, words) {
  let place = $("alerts").querySelector(`[data-key="${key}"]`);
  if (!words) place?.remove();
  else {
    if (!place) $("alerts").append((place = element("p", { class: "notice bad", "data-key": key })));
    if (place.textContent !== words) place.textContent = words;
  }
}

function ownerOf(of) {
  const row = of?.row;
  if (!row?.owner) return "";
  return of.members.find((one) => one.member.directory === row.owner)?.member.address || row.owner;
}

function takeStatus(next) {
  const before = status;
  status = next;
  if (!before) {
    $("sign-in").hidden = true;
    $("main").hidden = false;
    $("choose-bucket").hidden = false;
    $("leave").hidden = token === "";
    happened(`The server ${next.active ? "is active" : "is a replica"}, in epoch ${next.epoch}.`);
  } else {
    tellStatus(before, next);
  }
  const names = next.buckets.map((one) => one.name);
  const select = $("bucket");
  if (names.join("\n") !== [...select.options].map((one) => one.value).join("\n")) {
    const wanted = select.value || new URLSearchParams(location.hash.slice(1)).get("bucket");
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(wanted)) select.value = wanted;
    if (select.value !== wanted || !bucket) chooseBucket();
  }
  const comes = next.active ? "'upr-admin bucket create NAME' makes one." : "A replica has the buckets of its upstream.";
  alert_("none", names.length ? "" : `There is no bucket that you may see. ${comes}`);
  const troubles = next.buckets.filter((one) => one.problem).map((one) => [`bucket ${one.name}`, one.problem]);
  const all = [...next.problems.map((one) => ["server", one]), ...troubles];
  alert_("problems", all.map(([where, one]) => `${where}: ${one.message}${one.hint ? ` \u2014 ${one.hint}` : ""}`).join("\n"));
}

function tellStatus(before, next) {
  if (before.server_id !== next.server_id) happened("The server was started again.");
  if (before.epoch !== next.epoch) happened(`Epoch ${before.epoch} became ${next.epoch}.`);
  if (before.active !== next.active) happened(next.active ? "This server became active." : "This server is active no more.");
  if (before.ready !== next.ready) happened(next.ready ? "The server is ready." : "The server is not ready.");
  const [old, owner] = [ownerOf(before.set), ownerOf(next.set)];
  if (old !== owner && owner) happened(`${owner} owns the set now${old ? `, and not ${old}` : ""}.`);
  const known = new Map((before.set?.members ?? []).map((one) => [one.member.directory, one]));
  for (const one of next.set?.members ?? []) {
    const then = known.get(one.member.directory);
    const name = one.member.address || one.member.directory;
    if (!then) happened(`${name} joined the set.`);
    else if (then.reached !== one.reached) happened(`${name} ${one.reached ? "answers again" : "does not answer"}.`);
    else if (then.in_step !== one.in_step) happened(`${name} is ${one.in_step ? "in step" : "out of step"}.`);
  }
  const [waited, waits] = [before.set?.waiting, next.set?.waiting];
  if (waits && !waited) happened(sentence(waits));
  else if (waited && !waits) happened("What this server waited for is over.");
  const troubled = new Map(before.buckets.map((one) => [one.name, one.problem]));
  for (const one of next.buckets) {
    if (!troubled.has(one.name)) happened(`Bucket ${one.name} is new.`);
    else if (one.problem && !troubled.get(one.name)) happened(`Bucket ${one.name}: ${one.problem.message}.`);
    else if (!one.problem && troubled.get(one.name)) happened(`Bucket ${one.name} has no problem any more.`);
  }
}

function chooseBucket() {
  bucket = partition = consumer = null;
  chosenConsumer = "";
  rates = new Float64Array(PARTITIONS);
  flows = { written: null, sent: null, commit: null };
  histories.clear();
  loads.written = [];
  loads.sent = [];
  asked = null;
  $("answer").replaceChildren();
  alert_("bucket", "");
  remember();
}

function add(points, at, value) {
  points.push([at, value]);
  if (points.length > POINTS_MAX) {
    const half = points.length >> 1;
    points.splice(0, half, ...points.slice(0, half).filter((_, index) => index % 2 === 0));
  }
}

function takeBucket(next) {
  const before = bucket;
  bucket = next;
  if (!before || before.version !== next.version || next.at < before.at) {
    if (before) chooseBucket();
    bucket = next;
    flows = { written: null, sent: null, commit: null };
  } else if (next.at > before.at) {
    const passed = next.at - before.at;
    const weight = 1 - Math.exp(-passed / 3);
    for (let p = 0; p < PARTITIONS; p++) {
      const rate = Math.max(next.high[p] - before.high[p], 0) / passed;
      rates[p] += (rate - rates[p]) * weight;
      if (rates[p] < 0.02) rates[p] = 0;
    }
    const flow = (name) => Math.max(next.numbers[name] - before.numbers[name], 0) / passed;
    const commits = next.commits.count - before.commits.count;
    flows.written = flow("upr_written_rows");
    flows.sent = flow("upr_sent_rows");
    flows.commit = commits > 0 ? (next.commits.seconds - before.commits.seconds) / commits : null;
    add(loads.written, next.at, flows.written);
    add(loads.sent, next.at, flows.sent);
    tellBucket(before, next);
  }
  if (!before || next.at > before.at) {
    const shown = new Set(next.consumers.map((one) => one.name));
    for (const name of histories.keys()) if (!shown.has(name)) histories.delete(name);
    for (const one of next.consumers) {
      if (!histories.has(one.name)) histories.set(one.name, []);
      add(histories.get(one.name), next.at, one.lag);
    }
  }
}

function tellBucket(before, next) {
  if (before.changed !== next.changed) happened(`Partitions of ${next.name} have new failover ids.`);
  for (let state = 1; state < STATES.length; state++) {
    const [then, now] = [before, next].map((one) => one.state.filter((s) => s === state).length);
    if (now > then) happened(`${some(now - then, "partition")} of ${next.name} became ${STATES[state]}.`);
  }
}

function remember() {
  const place = new URLSearchParams({ bucket: $("bucket").value, partition: cursor });
  history.replaceState(null, "", `#${place}`);
}

// The map

const measures = {
  rate: {
    steps: [1, 10, 100, 1000],
    names: ["none", "under 1", "1 to 10", "10 to 100", "100 to 1,000", "more"],
    unit: "a second ",
    value: (p) => rates[p],
    words: (v) => `${perSecond(v)} mutations a second`,
  },
  lag: {
    steps: [10, 100, 1000, 10000],
    names: ["none", "1 to 9", "10 to 99", "100 to 999", "1,000 to 9,999", "more"],
    unit: "",
    value: (p) => lagColumn()[p],
    words: (v) => `lag ${some(v, "mutation")}`,
  },
  size: {
    steps: [2 ** 14, 2 ** 18, 2 ** 22, 2 ** 26],
    names: ["empty", "under 16 KiB", "to 256 KiB", "to 4 MiB", "to 64 MiB", "more"],
    unit: "",
    value: (p) => bucket.contents?.bytes[p] ?? 0,
    words: (v) => (bucket.contents ? `${bytes(v)} stored` : "size not looked at yet"),
  },
  state: {
    steps: [],
    names: [],
    unit: "",
    value: (p) => bucket.state[p],
    words: (v) => STATES[v],
  },
};

const measure = () => measures[document.querySelector("[name=measure]:checked").value];

function lagColumn() {
  const of = $("lag-of").value;
  if (of === "upstream" && bucket.behind) return bucket.behind;
  if (of === "consumer" && consumer) return consumer.lag;
  return bucket.lag;
}

function step(of, value) {
  return value <= 0 ? 0 : 1 + of.steps.filter((least) => value >= least).length;
}

let grid = { columns: 64, size: 12, left: 34 };
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["card", "ink", "quiet", "line", "focus", "cross", "cross-back", ...[0, 1, 2, 3, 4, 5].map((n) => `heat-${n}`)];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
}

function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// A state has a shape besides its tint, and a dead or damaged partition shows it whatever the map is about.
function mark(pen, x, y, wide, high, state, damaged, about) {
  const [near, right, low] = [3, wide - 3, high - 3];
  if (about === measures.state) {
    pen.fillStyle = colours[["heat-0", "heat-3", "heat-1", "heat-0", "heat-0"][state]];
    pen.fillRect(x, y, wide, high);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1;
    pen.beginPath();
    if (state === 2) {
      pen.moveTo(x + near, y + low);
      pen.lineTo(x + right, y + near);
    } else if (state === 3) {
      pen.arc(x + wide / 2, y + high / 2, 1.5, 0, 7);
    }
    pen.stroke();
  }
  if (state === DEAD || damaged) {
    for (const [colour, width] of [[colours["cross-back"], 3.5], [colours.cross, 1.5]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.beginPath();
      if (state === DEAD) {
        pen.moveTo(x + near, y + near);
        pen.lineTo(x + right, y + low);
        pen.moveTo(x + right, y + near);
        pen.lineTo(x + near, y + low);
      } else {
        const middle = x + Math.floor(wide / 2) + 0.5;
        pen.moveTo(middle, y + 2);
        pen.lineTo(middle, y + high - 5);
        pen.moveTo(middle, y + high - 3.5);
        pen.lineTo(middle, y + high - 2);
      }
      pen.stroke();
    }
  }
}

function drawMap() {
  const width = $("map").clientWidth;
  if (!width) return;
  const columns = width < 560 ? 32 : 64;
  const size = Math.max(Math.min((width - 40) / columns, 22), 6);
  grid = { columns, size, left: 34 };
  const lines = PARTITIONS / columns;
  const pen = sized($("cells"), width, Math.ceil(lines * size) + 6);
  const about = measure();
  const damaged = new Set(bucket.damaged);
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillStyle = colours.quiet;
  for (let line = 0; line < lines; line += size < 11 ? 2 : 1) {
    pen.fillText(String(line * columns), grid.left - 6, 3 + line * size + size / 2);
  }
  for (let p = 0; p < PARTITIONS; p++) {
    const [x, y, wide, high] = place(p);
    if (about !== measures.state) {
      pen.fillStyle = colours[`heat-${step(about, about.value(p))}`];
      pen.fillRect(x, y, wide, high);
    }
    mark(pen, x, y, wide, high, bucket.state[p], damaged.has(p), about);
  }
  const [x, y, wide, high] = place(cursor);
  pen.lineWidth = 2;
  pen.strokeStyle = colours.card;
  pen.strokeRect(x, y, wide, high);
  pen.strokeStyle = colours.focus;
  pen.strokeRect(x - 2, y - 2, wide + 4, high + 4);
}

// Edges are on whole pixels, one pixel apart.
function place(p) {
  const edge = (start, index) => Math.round(start + index * grid.size);
  const [column, line] = [p % grid.columns, Math.floor(p / grid.columns)];
  const [x, y] = [edge(grid.left, column), edge(3, line)];
  return [x, y, edge(grid.left, column + 1) - x - 1, edge(3, line + 1) - y - 1];
}

function words(p) {
  const [about, state] = [measure(), STATES[bucket.state[p]]];
  const value = about.words(about.value(p));
  const hurt = bucket.damaged.includes(p) && state !== "dead" ? ", damaged" : "";
  return `${p}: ${state}${hurt}, ${count(bucket.high[p])} mutations${about === measures.state ? "" : `, ${value}`}`;
}

function drawLegend() {
  const about = measure();
  const isState = about === measures.state;
  const counts = STATES.map((_, state) => bucket.state.filter((s) => s === state).length);
  const names = isState ? [1, 2, 3].map((s) => `${STATES[s]} ${count(counts[s])}`) : [...about.names];
  const tints = names.length;
  if (isState || counts[DEAD]) names.push(`dead ${count(counts[DEAD])}`);
  const dead = names.length;
  const hurt = bucket.damaged.filter((p) => bucket.state[p] !== DEAD).length;
  if (hurt) names.push(`damaged ${count(hurt)}`);
  const list = $("legend");
  if (list.children.length !== names.length) {
    list.replaceChildren(...names.map(() => element("li", {}, element("canvas"), element("span"))));
  }
  names.forEach((name, index) => {
    const [canvas, label] = list.children[index].children;
    const pen = sized(canvas, 13, 13);
    if (index >= tints) mark(pen, 0, 0, 13, 13, index < dead ? DEAD : 0, true, about);
    else if (isState) mark(pen, 0, 0, 13, 13, index + 1, false, about);
    else {
      pen.fillStyle = colours[`heat-${index}`];
      pen.fillRect(0, 0, 13, 13);
    }
    if (label.textContent !== name) label.textContent = name;
  });
  const values = Array.from({ length: PARTITIONS }, (_, p) => about.value(p));
  const total = values.reduce((sum, one) => sum + one, 0);
  const largest = values.indexOf(Math.max(...values));
  const format = { rate: perSecond, lag: count, size: bytes }[Object.keys(measures).find((name) => measures[name] === about)];
  let sum = format && total ? `${format(total)} ${about.unit}in all, most in partition ${largest}` : "";
  if (about === measures.size && !bucket.contents) sum = "being looked at";
  say($("sum"), sum);
}

function move(to, open = false) {
  if (!bucket) return;
  cursor = Math.min(Math.max(Math.trunc(to), 0), PARTITIONS - 1);
  asked = null;
  $("answer").replaceChildren();
  $("ask-id").value = $("ask-markers").value = "";
  $("ask-seqno").value = "0";
  remember();
  drawMap();
  $("cell").setAttribute("aria-live", "polite");
  $("cell").value = words(cursor);
  const name = $("bucket").value;
  const wanted = cursor;
  ask("partition", { bucket: name, partition: wanted }).then((found) => {
    if (wanted !== cursor || name !== $("bucket").value) return;
    partition = found;
    drawPartition();
    if (open) $("ask-id").focus();
  }, () => poll());
}

$("map").addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns, Home: -PARTITIONS, End: PARTITIONS, PageUp: -4 * grid.columns, PageDown: 4 * grid.columns };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in steps) {
    const to = cursor + steps[event.key];
    if ((to >= 0 && to < PARTITIONS) || !event.key.startsWith("Arrow")) move(to);
  } else if (event.key === "Enter") move(cursor, true);
  else return;
  event.preventDefault();
});

function under(event) {
  const box = $("cells").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - grid.left) / grid.size);
  const line = Math.floor((event.clientY - box.top - 3) / grid.size);
  const p = line * grid.columns + column;
  return column >= 0 && column < grid.columns && line >= 0 && p < PARTITIONS ? p : null;
}

$("map").addEventListener("click", (event) => {
  const p = under(event);
  if (p !== null) move(p);
});
$("map").addEventListener("mousemove", (event) => {
  const p = bucket && under(event);
  if (p !== null && bucket) $("cell").value = words(p);
});
$("map").addEventListener("mouseleave", () => bucket && ($("cell").value = words(cursor)));
$("go-to").addEventListener("change", () => $("go-to").value !== "" && move(Number($("go-to").value)));
$("measures").addEventListener("change", render);
$("lag-of").addEventListener("change", render);
$("bucket").addEventListener("change", () => {
  chooseBucket();
  render();
  poll();
});

// A partition, and what the handshake would answer

function drawPartition() {
  const one = partition;
  if (!one || one.partition !== cursor) return;
  say($("partition-title"), `Partition ${one.partition}`);
  say($("partition-state"), one.state, one.state === "dead" ? "bad" : "");
  if (document.activeElement !== $("go-to")) $("go-to").value = one.partition;
  const problem = one.problem ? `${one.problem.message}${one.problem.hint ? ` (${one.problem.hint})` : ""}` : one.reason;
  say($("partition-problem"), problem, "bad");
  facts($("places"), [
    ["high seqno", count(one.high)], ["durable", count(one.durable)],
    ["last marker", count(one.marker)], ["stored up to", count(one.stored)],
    ["purged up to", count(one.purge)], ["epoch", count(one.epoch)],
  ]);
  const log = [...one.log].reverse();
  const known = log.map((record) => record.failover_id).join();
  if ($("ids").dataset.known !== known) {
    $("ids").dataset.known = known;
    $("ids").replaceChildren(...log.map((record) => element("option", { value: record.failover_id })));
  }
  rows($("records").tBodies[0], log, (record) => record.failover_id, (record) => {
    const button = element("button", { type: "button", class: "plain", "aria-label": `Ask with the id ${record.failover_id}` }, "ask");
    const row = emptyRow("id", "n", "n", "n");
    row.lastChild.append(button);
    // The end of this id's history is where its followers stand.
    button.addEventListener("click", () => {
      const index = partition.log.findIndex((other) => other.failover_id === record.failover_id);
      questionAt(record.failover_id, partition.log[index + 1]?.seqno ?? partition.high);
    });
    return row;
  }, (row, record) => cells(row, record.failover_id, count(record.seqno), record.epoch ? count(record.epoch) : "unknown", null));
  rows($("readers").tBodies[0], one.consumers, (reader) => reader.name, (reader) => {
    const button = element("button", { type: "button", class: "plain", "aria-label": `Ask with the position of ${reader.name}` }, "ask");
    const row = emptyRow("", "n", "n", "n");
    row.lastChild.append(button);
    button.addEventListener("click", () => {
      const now = partition.consumers.find((other) => other.name === reader.name);
      if (now) questionAt(now.failover_id, now.seqno);
    });
    return row;
  }, (row, reader) => cells(row, reader.name, count(reader.seqno), count(reader.lag), null));
  $("readers-title").hidden = $("readers").parentElement.hidden = one.consumers.length === 0;
  drawTimeline();
}

function axis() {
  const [left, width] = [6, Math.max($("timeline").clientWidth - 12, 50)];
  const end = Math.max(partition.high, asked?.seqno ?? 0, 1);
  return { left, width, end, x: (seqno) => left + (width * Math.min(seqno, end)) / end };
}

function drawTimeline() {
  const one = partition;
  const { left, width, x } = axis();
  const drawn = [];
  const log = one.log;
  log.forEach((record, index) => {
    const [from, to] = [x(record.seqno), x(log[index + 1]?.seqno ?? one.high)];
    if (to > from) drawn.push(drawing("rect", { class: `band-${index % 2}`, x: from, y: 24, width: to - from, height: 20 }));
    if (to - from > 76) drawn.push(drawing("text", { class: "strong", x: from + 6, y: 38 }, `${record.failover_id.slice(0, 8)}\u2026`));
  });
  let free = -Infinity;
  for (const record of [...log].reverse()) {
    const at = x(record.seqno);
    drawn.push(drawing("line", { class: "tick", x1: at, x2: at, y1: 20, y2: 48 }));
    const label = count(record.seqno);
    // From the newest on: an older record whose label has no room goes without.
    if (free !== -Infinity && at + 8 * label.length > free) continue;
    const nearEnd = at > left + width - 8 * label.length;
    drawn.push(drawing("text", { x: at, y: 60, "text-anchor": nearEnd ? "end" : "start" }, label));
    free = at - 8;
  }
  if (one.high && x(one.high) - x(log[log.length - 1].seqno) > 90) {
    drawn.push(drawing("text", { x: x(one.high), y: 60, "text-anchor": "end" }, `high ${count(one.high)}`));
  }
  drawn.push(drawing("line", { class: "axis", x1: left, x2: left + width, y1: 44.5, y2: 44.5 }));
  if (asked) drawAsked(drawn, x);
  $("timeline").replaceChildren(...drawn);
  say($("timeline-words"), `${some(log.length, "record")}, from seqno 0 to ${count(one.high)}${one.purge ? `; deletions up to ${count(one.purge)} may be purged` : ""}. Click the line to ask about a place in it.`);
}

function drawAsked(drawn, x) {
  const at = x(asked.seqno);
  drawn.push(drawing("path", { class: "asked", d: `M${at - 6} 12h12l-6 10z` }));
  const to = asked.resume?.seqno;
  if (to !== undefined && to < asked.seqno) {
    const back = x(to);
    drawn.push(drawing("path", { class: "back", d: `M${at} 12V6H${back}V21` }));
    drawn.push(drawing("path", { class: "asked", d: `M${back - 4} 17h8l-4 7z` }));
  }
}

$("timeline").addEventListener("click", (event) => {
  if (!partition) return;
  const { left, width, end } = axis();
  const at = event.clientX - $("timeline").getBoundingClientRect().left - left;
  const seqno = Math.round((Math.min(Math.max(at / width, 0), 1)) * end);
  const record = [...partition.log].reverse().find((one) => one.seqno < seqno) ?? partition.log[0];
  questionAt(record.failover_id, seqno);
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  question($("ask-id").value.trim(), $("ask-seqno").value.trim());
});

// Of a client that stands at a marker, and followed from the beginning: it has the markers at which histories began.
function questionAt(id, seqno) {
  const own = partition.log.findIndex((record) => record.failover_id === id);
  const begun = partition.log.slice(0, own + 1).map((record) => record.seqno);
  const markers = [...new Set([...begun, seqno])].filter((one) => one > 0 && one <= seqno);
  $("ask-markers").value = markers.slice(-16).join(", ");
  return question(id, seqno);
}

async function question(id, seqno) {
  $("ask-id").value = id;
  $("ask-seqno").value = seqno;
  const wanted = cursor;
  const fields = { bucket: $("bucket").value, partition: wanted, id, seqno, markers: $("ask-markers").value };
  try {
    const found = await ask("explain", fields);
    if (wanted !== cursor) return;
    asked = { seqno: found.client.seqno, resume: found.resume };
    drawAnswer(found);
  } catch (error) {
    asked = null;
    $("answer").replaceChildren(element("p", { class: "notice bad" }, error.message));
  }
  drawPartition();
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function drawAnswer(found) {
  const { hello, start, resume, restart, client } = found;
  const steps = [["Hello", hello.rollback_seqno === null ? "go on" : `roll back to ${count(hello.rollback_seqno)}`, hello.words]];
  if (start) steps.push(["Start", start.rollback_seqno === null ? start.answer : `roll back to ${count(start.rollback_seqno)}`, start.words]);
  if (resume) steps.push(["The client", resume.undo ? `undoes what is above ${count(resume.seqno)}` : "undoes nothing", resume.words]);
  if (restart) steps.push(["Start again", restart.answer, restart.words]);
  let [verdict, kind] = [`It goes on from ${count(client.seqno)}, and undoes nothing.`, ""];
  if (resume?.undo) [verdict, kind] = [`It undoes what is above ${count(resume.seqno)}, and goes on from there.`, "undo"];
  else if (resume) verdict = `It undoes nothing, and goes on from ${count(resume.seqno)}.`;
  else if (start?.answer === "behind") verdict = "It keeps everything, and asks again later: this server has not caught up yet.";
  if (start?.alarm) [verdict, kind] = [`${verdict} A failover record is missing: an operator has to look at this server.`, "alarm"];
  $("answer").replaceChildren(
    element("p", { class: `verdict ${kind}` }, verdict),
    element("ol", {}, ...steps.map(([who, what, why]) => element("li", {}, element("b", {}, `${who}: ${what}. `), sentence(why)))),
  );
}

// Everything else

function path(points, width, height, top) {
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const span = Math.max(last - first, 1);
  return points.map(([at, value], index) => {
    const x = ((at - first) / span) * width;
    const y = height - 1 - (Math.min(value, top) / top) * (height - 3);
    return `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  }).join("");
}

function chart(svg, points, width, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  if (points.length < 2) return svg.replaceChildren();
  const top = Math.max(...points.map(([, value]) => value), 1);
  const drawn = path(points, width, height, top);
  svg.replaceChildren(
    drawing("path", { class: "under", d: `${drawn}L${width} ${height}L0 ${height}Z` }),
    drawing("path", { class: "line", d: drawn }),
  );
}

function drawTiles() {
  const n = bucket.numbers;
  const tiles = [
    ["Written a second", flows.written === null ? "\u2026" : perSecond(flows.written), loads.written],
    ["Sent a second", flows.sent === null ? "\u2026" : perSecond(flows.sent), loads.sent],
    ["Mutations so far", count(n.upr_bucket_mutations)],
    ["Time to commit", flows.commit === null ? "no commits" : duration(flows.commit)],
    ["Followers", `${count(n.upr_followers)}`, null, some(bucket.streams, "stream") + (bucket.streams_from_store ? `, ${count(bucket.streams_from_store)} behind the tail` : "")],
    ["Largest lag", count(bucket.consumers[0]?.lag ?? 0), null, !bucket.consumers.length ? "no consumers" : bucket.consumers[0].lag ? bucket.consumers[0].name : "everybody is up to date"],
  ];
  const list = $("tiles");
  if (!list.children.length) {
    list.replaceChildren(...tiles.map(([name, , points]) => element("div", {}, element("dt", {}, name), element("dd"), points ? drawing("svg", { "aria-hidden": "true" }) : element("dd", { class: "quiet" }))));
  }
  tiles.forEach(([, value, points, below], index) => {
    const [, number, extra] = list.children[index].children;
    if (number.textContent !== value) number.textContent = value;
    if (points) chart(extra, points, 150, 22);
    else {
      extra.className = "quiet below";
      if (extra.textContent !== (below ?? "")) extra.textContent = below ?? "";
    }
  });
}

function drawConsumers() {
  const all = bucket.consumers_in_all;
  const shown = bucket.consumers.length;
  say($("consumers-count"), all > shown ? `the ${shown} furthest behind of ${count(all)}` : all ? count(all) : "none yet");
  $("consumers").hidden = all === 0;
  rows($("consumers").tBodies[0], bucket.consumers, (one) => one.name, (one) => {
    const row = emptyRow("", "n", "", "n", "n", "n");
    const button = element("button", { type: "button", class: "plain", "aria-pressed": "false" }, one.name);
    button.addEventListener("click", () => {
      chosenConsumer = chosenConsumer === one.name ? "" : one.name;
      poll();
    });
    row.children[0].append(button);
    row.children[2].append(drawing("svg", { "aria-hidden": "true" }));
    return row;
  }, (row, one) => {
    const idle = one.idle_seconds === null ? "never" : one.idle_seconds < 2 ? "now" : `${duration(one.idle_seconds)} ago`;
    cells(row, null, count(one.lag), null, count(one.partitions), one.members === null ? "" : count(one.members), one.connected || one.members ? idle : `${idle}, away`);
    row.classList.toggle("chosen", one.name === chosenConsumer);
    row.querySelector("button").setAttribute("aria-pressed", String(one.name === chosenConsumer));
    chart(row.querySelector("svg"), histories.get(one.name) ?? [], 170, 20);
  });
  drawConsumer();
}

function drawConsumer() {
  $("consumer").hidden = !consumer;
  const options = [["all", "the slowest consumer"]];
  if (consumer) options.push(["consumer", consumer.name]);
  if (bucket.behind) options.push(["upstream", "this replica, behind its upstream"]);
  const select = $("lag-of");
  const labels = options.map(([, label]) => label).join("\n");
  if (select.dataset.labels !== labels) {
    const before = select.value;
    select.dataset.labels = labels;
    select.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
    if (options.some(([value]) => value === before)) select.value = before;
  }
  $("choose-lag").hidden = measure() !== measures.lag;
  if (!consumer) return;
  say($("consumer-title"), `Lag of ${consumer.name}`);
  const points = histories.get(consumer.name) ?? [];
  const svg = $("consumer-chart");
  chart(svg, points, 600, 110);
  const values = points.map(([, value]) => value);
  const since = points.length > 1 ? points[points.length - 1][0] - points[0][0] : 0;
  say($("consumer-words"), points.length > 1 ? `Over ${duration(since)}: at most ${count(Math.max(...values))}, now ${count(values[values.length - 1])} mutations.` : "Being gathered.");
  $("members").hidden = consumer.members.length === 0;
  rows($("members").tBodies[0], consumer.members, (one) => one.name, () => emptyRow("", "", "n", "n", "n"), (row, one) => {
    cells(row, one.name, one.peer || "no call", count(one.partitions), count(one.releasing), one.lease_left_seconds ? duration(one.lease_left_seconds) : "ended");
  });
}

$("consumer-map").addEventListener("click", () => {
  document.querySelector("[name=measure][value=lag]").checked = true;
  $("lag-of").value = "consumer";
  render();
  $("map").focus();
});

function drawStorage() {
  const [n, c] = [bucket.numbers, bucket.contents];
  const bars = [["Tail: recent changes in memory", n.upr_tail_bytes, n.upr_tail_limit_bytes, "all writes wait at the limit"]];
  if (n.upr_quota_bytes) bars.push(["Stored, of the quota", n.upr_store_used_bytes, n.upr_quota_bytes, ""]);
  if (c) {
    const size = c.bytes.reduce((sum, one) => sum + one, 0);
    if (size) bars.push(["Stored but not merged", c.unmerged_bytes, size, ""]);
  }
  rows($("bars"), bars, ([name]) => name, ([name]) => element("div", { class: "bar" }, element("span", {}, name), element("span", { class: "quiet" }), element("div", { class: "track", "aria-hidden": "true" }, element("i"))), (row, [, used, limit, note]) => {
    const part = limit ? Math.min(used / limit, 1) : 0;
    const text = `${bytes(used)} of ${bytes(limit)}`;
    if (row.children[1].textContent !== text) row.children[1].textContent = text;
    row.title = note;
    const fill = row.querySelector("i");
    fill.style.width = `${(100 * part).toFixed(1)}%`;
    fill.classList.toggle("high", part > 0.85);
  });
  facts($("storage"), [
    ["Store, as of the last flush", bytes(n.upr_store_used_bytes)],
    ["Store's file", bucket.file_bytes === undefined ? "unknown" : bytes(bucket.file_bytes)],
    ["Free on its disk", bucket.free_bytes === undefined ? "unknown" : bytes(bucket.free_bytes)],
    ["Room for writes", bytes(Math.max(bucket.room_bytes, 0))],
    ["Blocks and rows stored", c ? `${count(c.blocks)} and ${count(c.rows.reduce((sum, one) => sum + one, 0))}` : "being looked at"],
    ["Partitions to look at for merging", count(n.upr_merge_waiting_partitions)],
    ["Merged since the start", `${bytes(n.upr_merge_input_bytes)} to ${bytes(n.upr_merge_output_bytes)}`],
    ["Deletions purged since the start", count(n.upr_purged_tombstones)],
    ["Cuts held", bucket.cuts.length ? bucket.cuts.map((cut) => `${cut.name} (${duration(cut.expires_seconds)})`).join(", ") : "none"],
  ]);
}

function drawServers() {
  const set = status.set;
  const members = set?.members ?? [];
  say($("epoch"), status.epoch ? `epoch ${status.epoch}${set && Number(set.promised) > status.epoch ? `, ${set.promised} is promised` : ""}` : "");
  say($("waiting"), set?.waiting ? sentence(set.waiting) : "", "bad");
  $("servers").hidden = members.length === 0;
  const [own, part] = [set?.directory, set?.part];
  $("servers").classList.toggle("plain", !part?.cluster);
  rows($("servers").tBodies[0], members, (one) => one.member.directory, () => emptyRow("", "", "", "n", "n", "n cluster", "cluster"), (row, one) => {
    const directory = one.member.directory;
    const owns = directory === set.row.owner;
    const counted = set.row.counted.includes(directory) ? ", counted" : "";
    const role = (one.claiming ? `becoming the owner${counted}` : owns ? "owner" : `replica${counted}`) + (one.drained ? ", drained" : "");
    const name = one.member.address || directory;
    // Of others only the owner knows it.
    const lag = owns || !one.reached || !(status.active || directory === own) ? "" : count(Number(one.lag));
    const inStep = one.reached ? (one.in_step ? "\u2713 yes" : "\u2715 no") : "\u2715 does not answer";
    const grant = one.grant_seconds && directory !== own ? duration(one.grant_seconds) : "";
    // What was read longer ago says nothing of now.
    const key = part?.etcd_seconds > 10 ? "" : one.has_key ? "\u2713 yes" : "\u2715 no";
    cells(row, directory === own ? `${name} (this one)` : name, role, inStep, lag, Number(one.epoch) ? one.epoch : "", grant, key);
    row.classList.toggle("bad", !one.reached || !one.in_step);
  });
  drawCluster(part);
  const up = bucket?.upstream;
  const pairs = [];
  if (up) {
    pairs.push(["Follows", `${up.address || "nobody yet"}${up.connected ? "" : ", not connected"}`]);
    pairs.push(["In step", up.in_step ? "yes" : "no"]);
    pairs.push(["Behind", up.lag_seconds ? `for ${duration(up.lag_seconds)}` : "no"]);
    pairs.push(["Mutations undone", count(up.undone)]);
    if (up.problem) pairs.push(["Problem", up.problem.message]);
  } else if (!members.length) {
    pairs.push(["This server", "is alone"]);
  }
  for (const one of bucket?.replicas ?? []) {
    pairs.push([`Sends to ${one.address}`, one.anonymous ? "not registered" : `${count(Number(one.lag))} behind`]);
  }
  facts($("upstream"), pairs);
}

function drawCluster(part) {
  if (!part?.cluster) return facts($("cluster"), []);
  const changes = Number(part.owner_changes);
  const pairs = [
    ["Cluster", `${part.cluster}; this server: ${part.state}`],
    ["Owner known for", `${part.owner_seconds ? duration(part.owner_seconds) : "none is known"}${changes ? `; ${some(changes, "change")} seen` : ""}`],
    ["Counted servers", count(part.counted)],
    ["etcd silent for", duration(part.etcd_seconds)],
  ];
  if (status.active) pairs.push(["May serve for", part.grant_seconds ? `${duration(part.grant_seconds)} without another grant` : "no time: no server grants it"]);
  facts($("cluster"), pairs);
}

function drawHead() {
  const owner = ownerOf(status.set);
  const role = status.active ? "active" : owner ? `replica; ${owner} is active` : "replica";
  say($("role"), `${role}, epoch ${status.epoch}`);
  say($("ready"), status.ready ? "\u2713 ready" : "\u2715 not ready", status.ready ? "good" : "bad");
  say($("about"), `${status.version}, up ${duration(status.uptime_seconds)}, ${bytes(Number(status.memory_bytes))}${status.viewer === "anyone" ? "" : `, seen as ${status.viewer}`}`);
  const age = Math.round((Date.now() - answeredAt) / 1000);
  say($("fresh"), lost ? `\u2715 no answer for ${duration(age)}` : "\u2713 live", lost ? "bad" : "");
  document.body.classList.toggle("stale", lost);
  document.title = `${lost ? "? " : status.ready ? "" : "! "}${location.host} \u2013 upr-stream`;
}

function render() {
  if (!status || document.hidden) return;
  drawHead();
  drawServers();
  const damaged = bucket?.problems.map((one) => `partition ${one.partition}: ${one.message}`) ?? [];
  alert_("partitions", damaged.slice(0, 3).join("\n") + (damaged.length > 3 ? `\nand more, ${bucket.damaged.length} in all` : ""));
  $("main").classList.toggle("without", !bucket);
  if (!bucket) return;
  drawTiles();
  drawConsumers();
  drawMap();
  drawLegend();
  // Spoken when the cursor moves, and not each second.
  $("cell").setAttribute("aria-live", "off");
  if (!$("map").matches(":hover")) $("cell").value = words(cursor);
  drawStorage();
  drawPartition();
}

readColours();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  render();
});
addEventListener("resize", render);
addEventListener("hashchange", () => location.reload());
document.addEventListener("visibilitychange", () => !document.hidden && poll());
cursor = Math.min(Math.max(Math.trunc(Number(new URLSearchParams(location.hash.slice(1)).get("partition"))) || 0, 0), PARTITIONS - 1);
poll();
