// The live page: one stream of overviews, drawn when they arrive, and each second in between.

import * as actions from "./actions.js";
import { at, show, text } from "./elements.js";
import { epochMs, moment } from "./format.js";
import * as sections from "./sections.js";
import * as timeline from "./timeline.js";

const SILENT_MS = 12_000;
const AGAIN_MS = 3_000;
const HIDDEN_MS = 5_000;

let overview = null;
let arrivedMs = 0;
let aheadMs = 0; // the sidecar's clock before this machine's
let stream = null;
let again = null;
let hiding = null;
let hasEnded = false;

function connect() {
  clearTimeout(again);
  stream?.close();
  stream = new EventSource("v1/live");
  stream.addEventListener("overview", (event) => {
    hasEnded = false;
    arrivedMs = performance.now();
    overview = JSON.parse(event.data);
    aheadMs = epochMs(overview.at) - Date.now();
    draw();
  });
  stream.addEventListener("ended", () => {
    hasEnded = true;
    stream.close();
    again = setTimeout(connect, AGAIN_MS);
    tick();
  });
  stream.addEventListener("error", () => {
    // The browser tries again by itself, except after an answer that is no stream.
    if (stream.readyState === EventSource.CLOSED && !hasEnded) again = setTimeout(connect, AGAIN_MS);
    tick();
  });
}

const nowMs = () => Date.now() + aheadMs;
const silentMs = () => performance.now() - arrivedMs;

function connection() {
  if (hasEnded) return "ended";
  if (overview === null) return stream.readyState === EventSource.CLOSED ? "lost" : "connecting";
  return stream.readyState === EventSource.OPEN && silentMs() < SILENT_MS ? "live" : "lost";
}

function draw() {
  const now = nowMs();
  sections.draw(overview, now);
  timeline.draw(overview, now);
  tick();
  document.title = sections.title(overview);
}

function tick() {
  const state = connection();
  const isLive = state === "live";
  document.body.dataset.connection = state;
  text(at("connection-text"), { live: "live", lost: "not connected", ended: "ended", connecting: "connecting" }[state]);
  show(at("stale"), state === "lost" || state === "ended");
  text(at("stale"), sentence(state));
  if (overview === null) return;
  if (isLive) sections.tick(overview, nowMs(), silentMs() / 1000);
  actions.draw(overview, isLive);
}

function sentence(state) {
  if (state === "ended") return "The sidecar has ended. This is the last it said.";
  if (state !== "lost") return "";
  const since = overview === null ? "" : ` This is what it said at ${moment(epochMs(overview.at), nowMs())}.`; // a time, which stays: it is announced once
  return `The sidecar does not answer; trying again.${since}`;
}

function visibility() {
  clearTimeout(hiding);
  if (document.hidden) {
    hiding = setTimeout(() => stream.close(), HIDDEN_MS); // nobody looks: the sidecar computes nothing
  } else if (stream.readyState === EventSource.CLOSED) {
    connect();
  }
}

actions.begin();
timeline.begin(() => overview && timeline.draw(overview, nowMs()));
document.addEventListener("visibilitychange", visibility);
setInterval(() => document.hidden || tick(), 1000);
connect();
