// The checkpoints: a strip over time, and a list with what became of each.

import { at, attribute, make, progress, show, text } from "./elements.js";
import { ago, bytes, count, duration, epochMs, moment } from "./format.js";

const WIDE = matchMedia("(min-width: 900px)");
const REASONS = { periodic: "periodic", jit: "just in time", manual: "on request", final: "final model" };
const STATES = {
  writing: "being written",
  rejected: "not usable",
  finished: "waiting",
  uploading: "uploading",
  paused: "paused",
  uploaded: "waiting for other nodes",
  committed: "durable",
  superseded: "overtaken",
  lost: "lost",
  "given-up": "given up",
};
const KINDS = { committed: "good", rejected: "bad", bad: "bad", lost: "bad", "given-up": "bad", superseded: "past" };

const rows = new Map();
let isOpen = false;

export function begin(again) {
  at("more").addEventListener("click", () => {
    isOpen = !isOpen;
    again();
  });
}

/** Draw the checkpoints of an overview. */
export function draw(overview, nowMs) {
  const all = overview.checkpoints;
  const first = WIDE.matches ? 12 : 6;
  const shown = all.slice(0, isOpen ? all.length : first);
  show(at("none"), all.length === 0);
  show(at("more"), all.length > first);
  text(at("more"), isOpen ? "Show fewer" : `Show ${all.length - first} more`);
  attribute(at("more"), "aria-expanded", isOpen);
  text(at("timeline-count"), counted(overview));
  drawList(shown, nowMs);
  drawStrip(all, nowMs);
}

function counted(overview) {
  const { state, folders, detail } = overview.earlier;
  if (state === "failed") return `the store's list could not be read: ${detail}`;
  if (state === "reading") return "reading the store…";
  if (folders === null) return "";
  const newest = folders > overview.checkpoints.length ? `, the newest ${overview.checkpoints.length} shown` : "";
  const present = Math.max(folders, overview.checkpoints.filter((checkpoint) => checkpoint.in_store).length); // the store is listed seldom
  return `${count(present)} in the store${newest}`;
}

function drawList(checkpoints, nowMs) {
  const list = at("list");
  const names = new Set(checkpoints.map((checkpoint) => checkpoint.name));
  for (const [name, row] of rows) {
    if (!names.has(name)) {
      row.node.remove();
      rows.delete(name);
    }
  }
  checkpoints.forEach((checkpoint, index) => {
    const row = rows.get(checkpoint.name) ?? newRow(checkpoint.name);
    if (list.children[index] !== row.node) list.insertBefore(row.node, list.children[index] ?? null);
    fill(row, checkpoint, nowMs);
  });
}

function newRow(name) {
  const row = {
    node: make("li"),
    mark: make("i", "mark"),
    name: make("b"),
    why: make("span", "tag"),
    state: make("span", "state"),
    when: make("span", "when"),
    size: make("span", "size"),
    detail: make("span", "detail"),
    bar: make("progress"),
  };
  row.mark.setAttribute("aria-hidden", "true");
  row.bar.setAttribute("aria-label", `Upload of ${name}`);
  row.node.append(
    row.mark,
    make("span", "title", null, row.name, " ", row.why),
    make("span", "fate", null, row.state),
    make("span", "more", null, row.when, row.size),
    row.bar,
    row.detail,
  );
  rows.set(name, row);
  return row;
}

function fill(row, checkpoint, nowMs) {
  const created = epochMs(checkpoint.created_at);
  const committed = epochMs(checkpoint.committed_at);
  const isSending = ["uploading", "paused", "finished"].includes(checkpoint.state) && checkpoint.size_bytes > 0;
  const share = isSending ? (checkpoint.sent_bytes ?? 0) / checkpoint.size_bytes : 0;
  row.node.dataset.kind = KINDS[checkpoint.state] ?? "going";
  row.node.dataset.why = checkpoint.save_reason ?? "";
  text(row.name, checkpoint.step === null || checkpoint.name === "final" ? checkpoint.name : `Step ${count(checkpoint.step)}`);
  text(row.why, REASONS[checkpoint.save_reason] ?? "");
  show(row.why, checkpoint.save_reason in REASONS);
  text(row.state, fate(checkpoint, created, committed, share));
  text(row.when, created === null ? "" : `saved ${ago((nowMs - created) / 1000)}`);
  show(row.when, created !== null);
  attribute(row.when, "title", created === null ? null : moment(created, nowMs));
  text(row.size, [checkpoint.size_bytes === null ? "" : bytes(checkpoint.size_bytes), place(checkpoint)].filter(Boolean).join(" · "));
  show(row.bar, isSending && checkpoint.state !== "finished");
  progress(row.bar, share, `${Math.floor(share * 100)} %`);
  text(row.detail, checkpoint.reason ?? "");
  show(row.detail, Boolean(checkpoint.reason));
}

function fate(checkpoint, created, committed, share) {
  if (checkpoint.state === "uploaded" && !(checkpoint.node_count > 1)) return "committing";
  const state = STATES[checkpoint.state] ?? checkpoint.state;
  if (checkpoint.state === "uploading" || checkpoint.state === "paused") return `${state} ${Math.floor(share * 100)} %`;
  const isKnown = checkpoint.state === "committed" && created !== null && committed !== null && committed >= created;
  return isKnown ? `durable after ${duration((committed - created) / 1000)}` : state;
}

function place(checkpoint) {
  if (checkpoint.on_volume && checkpoint.in_store) return "volume and store";
  return checkpoint.in_store ? "store" : "volume";
}

function drawStrip(checkpoints, nowMs) {
  const dated = checkpoints.map((checkpoint) => [epochMs(checkpoint.created_at), checkpoint]).filter(([created]) => created !== null);
  show(at("strip"), dated.length > 1);
  if (dated.length < 2) return;
  const oldest = Math.min(...dated.map(([created]) => created));
  const span = Math.max(1000, nowMs - oldest);
  const track = at("track");
  while (track.children.length > dated.length) track.lastElementChild.remove();
  while (track.children.length < dated.length) track.append(document.createElement("i"));
  dated.forEach(([created, checkpoint], index) => {
    const mark = track.children[index];
    const left = `${((100 * (created - oldest)) / span).toFixed(1)}%`;
    if (mark.style.left !== left) mark.style.left = left;
    mark.dataset.kind = KINDS[checkpoint.state] ?? "going";
    mark.dataset.why = checkpoint.save_reason ?? "";
  });
  text(at("strip-from"), ago((nowMs - oldest) / 1000));
}
