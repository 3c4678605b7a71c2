// The buttons: calls of the API that change something, with a header that no page of another site can send.

import { at, attribute, show, text } from "./elements.js";
import { bytes, rate } from "./format.js";

const FLUSH_S = 60;
const GUARD = { "content-type": "application/json", "x-checkpoint-sidecar": "page" };

let token = null;
let watched = null;
let isFlushing = false;

export function begin() {
  at("save").addEventListener("click", () => save(false));
  at("stop").addEventListener("click", () => at("stop-dialog").showModal());
  at("stop-no").addEventListener("click", () => at("stop-dialog").close());
  at("stop-yes").addEventListener("click", () => {
    at("stop-dialog").close();
    save(true);
  });
  at("flush").addEventListener("click", flush);
  at("limit-form").addEventListener("submit", (event) => {
    event.preventDefault();
    limit(at("limit").value.trim());
  });
  at("limit-none").addEventListener("click", () => limit(null));
  at("token-no").addEventListener("click", () => at("token-dialog").close());
  at("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    at("token-dialog").close(at("token").value.trim());
  });
}

/** Draw what can be done now. `isLive`: the overview is not stale. */
export function draw(overview, isLive) {
  const canSave = isLive && overview.trainer.alive;
  at("save").disabled = at("stop").disabled = !canSave;
  at("flush").disabled = !isLive || isFlushing;
  at("limit-set").disabled = at("limit-none").disabled = !isLive;
  const hint = overview.trainer.alive ? "The trainer saves at the end of its step." : "A save needs a running trainer with the hook.";
  text(at("save-hint"), hint);
  const now = overview.transfers.limit_bytes_per_s;
  text(at("limit-now"), now === null ? "no limit now" : `${rate(now)} now`);
  drawSave(overview.save);
}

function drawSave(saving) {
  if (saving === null || saving.id !== watched) return;
  const name = saving.checkpoint ?? "the checkpoint";
  const sent = saving.size_bytes ? ` ${bytes(saving.sent_bytes)} of ${bytes(saving.size_bytes)} are sent.` : "";
  const sentences = {
    asked: `Asked: ${saving.detail ?? "the trainer saves at the end of its step"}.`,
    saved: `${name} is saved and on its way to the store.${sent}`,
    durable: `${name} is durable.`,
    failed: `Not saved: ${saving.detail ?? "the reason is in the log"}.`,
  };
  say(sentences[saving.state] ?? saving.state, saving.state === "failed");
  if (saving.state === "durable" || saving.state === "failed") watched = null;
}

async function save(stop) {
  say("Asking the trainer…");
  const saving = await post("v1/save", { stop });
  if (saving === null) return;
  watched = saving.id;
  drawSave(saving);
}

async function flush() {
  isFlushing = at("flush").disabled = true;
  say(`Waiting, up to ${FLUSH_S} s, until everything finished is durable…`);
  const flushed = await post("v1/flush", { timeout_s: FLUSH_S });
  isFlushing = at("flush").disabled = false;
  if (flushed !== null) say("Everything that the trainer finished is durable.");
}

async function limit(value) {
  if (value === "") {
    say("Write a rate such as 200MB/s.", true);
    at("limit").focus();
    return;
  }
  const changed = await post("v1/bandwidth", { limit: value });
  if (changed === null) return;
  at("limit").value = "";
  say(changed.limit_bytes_per_s === null ? "Uploads have no limit." : `Uploads are limited to ${rate(changed.limit_bytes_per_s)}.`);
}

/** Return the answer; null: it was refused, and the reason is shown. */
async function post(path, body) {
  const headers = token === null ? GUARD : { ...GUARD, authorization: `Bearer ${token}` };
  let response;
  try {
    response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  } catch {
    say("The sidecar does not answer.", true);
    return null;
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  if (response.status === 401 && (await askForToken())) return post(path, body);
  token = response.status === 401 ? null : token;
  say(answer.detail ?? `The sidecar answered ${response.status}.`, true);
  return null;
}

function askForToken() {
  const dialog = at("token-dialog");
  at("token").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        token = dialog.returnValue || null;
        dialog.returnValue = at("token").value = "";
        resolve(token !== null);
      },
      { once: true },
    );
  });
}

function say(sentence, isBad = false) {
  const outcome = at("outcome");
  text(outcome, sentence);
  attribute(outcome, "data-kind", isBad ? "bad" : null);
  show(outcome, true);
}
