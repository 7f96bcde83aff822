// The server's figures, read once a second while the page is seen.

import { $ } from "./elements.js";
import { call } from "./server.js";
import { offerFloors } from "./settings.js";

const SECONDS = 60; // of the curve of throughput
const PATIENCE = 10_000; // milliseconds for an answer
// From many bits to few, evenly over the logarithm of the bits, as in the plots of qkv-engine bench.
const COLORS = ["#1b3a5c", "#2f7ebc", "#8cc7c1", "#f2c14e", "#e4632d", "#9c1c28"];
const [MOST_BITS, FEWEST_BITS] = [16, 2];

const speeds = [];
let before = null;
let timer = 0;
let isReading = false;
let known = null; // name of the model that was read about
let readModel = async () => {};

/** Reads the figures now and every second, and stops while nobody sees them. `onModel` reads about another model. */
export function start(onModel) {
  readModel = onModel;
  document.addEventListener("visibilitychange", poll);
  poll();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden || isReading) return;
  isReading = true;
  try {
    draw(await (await call("stats", { signal: AbortSignal.timeout(PATIENCE) })).json());
  } catch (error) {
    if (error.status === 403) return hide(); // for good: they are another tenant's to see
    $("brief").textContent = error.message;
  }
  isReading = false;
  timer = setTimeout(poll, 1000);
}

async function hide() {
  $("live").hidden = true;
  await readModel();
}

function draw(stats) {
  drawBlocks(stats);
  drawMemory(stats);
  const speed = drawSpeed(stats);
  const free = size(stats.kv_bytes_total - stats.kv_bytes_used - stats.kv_bytes_cached);
  if (stats.model !== known) learn(stats.model);
  $("brief").textContent = `${speed} tok/s, ${free} free`;
  offerFloors(Object.keys(stats.kv_rungs));
}

async function learn(name) {
  known = name;
  await readModel().catch(() => (known = null)); // the next figures try again
}

function drawBlocks({ kv_rungs, kv_blocks, num_running }) {
  const rungs = Object.entries(kv_rungs).map(([name, bits]) => {
    return { name, bits, blocks: kv_blocks[name] ?? 0, color: colorOf(bits) };
  });
  bar($("blocks"), rungs.map(({ name, blocks, color }) => [name, blocks, color]));
  $("rungs").replaceChildren(...rungs.map(({ name, bits, blocks, color }) => {
    const row = document.createElement("li");
    row.style.setProperty("--color", color);
    row.append(name, span("figure", blocks), span("note", `${+bits.toFixed(2)} bits`));
    return row;
  }));
  const holders = num_running ? "of running requests and cached prefixes" : "of cached prefixes; no request runs";
  $("holders").textContent = rungs.some(({ blocks }) => blocks) ? holders : "";
}

function drawMemory(stats) {
  const { kv_bytes_total: total, kv_bytes_used: used, kv_bytes_cached: cached } = stats;
  const free = total - used - cached;
  bar($("memory"), [["used", used, "var(--used)"], ["cached", cached, "var(--cached)"], ["free", free, "transparent"]], size);
  const { host_bytes_total: host, host_bytes_used: asleep = 0 } = stats; // none are sent where there is no host memory
  $("free").textContent = `${size(free)} free of ${size(total)}${cached ? `, ${size(cached)} cached prefixes` : ""}`
    + (host ? `, ${size(asleep)} of ${size(host)} on the host` : "");
}

/** Adds the speed since the last figures to the curve. */
function drawSpeed(stats) {
  const [tokens, seconds] = ["generation_tokens", "time"].map((name) => stats[name] - (before ?? stats)[name]);
  const speed = tokens > 0 && seconds > 0 ? tokens / seconds : 0; // below 0 where the server was started anew
  before = stats;
  speeds.push(speed);
  if (speeds.length > SECONDS) speeds.shift();
  const most = Math.max(...speeds, 1);
  const points = speeds.map((value, i) => `${SECONDS - speeds.length + i},${20 - (19 * value) / most}`);
  $("speed").querySelector("polyline").setAttribute("points", points.join(" "));
  const ends = [`${SECONDS - speeds.length},20`, `${SECONDS - 1},20`];
  $("speed").querySelector("polygon").setAttribute("points", [ends[0], ...points, ends[1]].join(" "));
  const shown = speed < 10 ? +speed.toFixed(1) : Math.round(speed).toLocaleString("en");
  $("rate").textContent = `${shown} tok/s, ${stats.num_running} running, ${stats.num_waiting} waiting`;
  return shown;
}

/** A bar of parts, each a name, a size and a colour; `words` writes a size for those who hear the page. */
function bar(parent, parts, words = String) {
  parent.replaceChildren(...parts.filter(([, amount]) => amount).map(([name, amount, color]) => {
    const part = Object.assign(document.createElement("span"), { title: name });
    part.style.flexGrow = amount;
    part.style.setProperty("--color", color);
    return part;
  }));
  parent.setAttribute("aria-label", parts.map(([name, amount]) => `${name}: ${words(amount)}`).join(", "));
}

function colorOf(bits) {
  const span = Math.log2(MOST_BITS / FEWEST_BITS);
  const place = Math.min(Math.max(Math.log2(MOST_BITS / bits) / span, 0), 1) * (COLORS.length - 1);
  const i = Math.min(Math.floor(place), COLORS.length - 2);
  return `color-mix(in srgb, ${COLORS[i + 1]} ${(100 * (place - i)).toFixed(0)}%, ${COLORS[i]})`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes ? Math.min(Math.floor(Math.log2(bytes) / 10), units.length - 1) : 0;
  const value = bytes / 1024 ** power;
  return `${value < 100 && power ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

function span(className, text) {
  return Object.assign(document.createElement("span"), { className, textContent: text });
}
