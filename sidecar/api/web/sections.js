// Everything but the checkpoints: the answer, the ending, the resume, training, throughput, places.

import { at, attribute, make, progress, show, sign, text, texts } from "./elements.js";
import { ago, bytes, count, digits, duration, epochMs, rate } from "./format.js";

const SIGNS = {
  safe: "M4.5 12.5l5 5L19.5 7",
  unknown: "M12 17.5h.01M9 9a3 3 0 1 1 4.2 2.8c-.8.4-1.2 1-1.2 2",
  attention: "M12 6.5v7M12 17.5h.01",
  danger: "M7 7l10 10M17 7L7 17",
};
const LEVELS = { safe: "Safe", unknown: "Not known", attention: "Needs attention", danger: "In danger" };
const PHASES = { starting: "starting", running: "running", draining: "ending", flushing: "flushing", done: "ended" };
const STATES = { running: "training", preempted: "preempted, has ended", succeeded: "finished", failed: "failed" };
const VERDICTS = { fits: "fits", "may-fit": "may fit", "no-time": "no time" };
const RESUME_ENDED = { ready: { local: "on the volume", store: "downloaded" }, none: "at step 0, with nothing to resume from" };
const MOST_SAMPLES = 60;

const samples = [];
let lastSample = null;
let lastStep = null;
let speed = null;
let drawnLevel = "";

/** Draw an overview that has just arrived. */
export function draw(overview, nowMs) {
  drawAnswer(overview);
  drawCosts(overview);
  drawTraining(overview, nowMs);
  drawUploads(overview, nowMs);
  drawPlaces(overview);
  drawResume(overview.resume);
  drawPlan(overview);
  text(at("job"), who(overview));
  text(at("phase"), PHASES[overview.phase] ?? overview.phase);
  show(at("phase"), true);
  at("phase").dataset.phase = overview.phase;
  text(at("version"), `checkpoint-sidecar ${overview.version}`);
}

/** Draw what changes with every second. `elapsedS`: since the overview arrived. */
export function tick(overview, nowMs, elapsedS) {
  drawDurable(overview, nowMs);
  drawCountdown(overview, elapsedS);
}

function who(overview) {
  const node = overview.node_count > 1 && overview.node_index !== null ? `, node ${overview.node_index + 1} of ${overview.node_count}` : "";
  return `${overview.job ?? overview.pod}${node}`;
}

function drawAnswer(overview) {
  const { level, headline, reasons } = overview.safety;
  at("answer").dataset.level = level;
  if (level !== drawnLevel) {
    at("sign").replaceChildren(sign(SIGNS[level]));
    drawnLevel = level;
  }
  text(at("level"), LEVELS[level]);
  text(at("headline"), headline);
  texts(at("reasons"), reasons);
  show(at("reasons"), reasons.length > 0);
  // Once the pod is ending, it is too late for advice on settings.
  const advice = overview.degraded_reason ?? overview.lease.reason ?? (overview.termination === null ? overview.at_risk.advice : null);
  text(at("advice"), advice && !/^\w+:\/\//.test(advice) ? advice[0].toUpperCase() + advice.slice(1) : advice ?? "");
  show(at("advice"), Boolean(advice));
}

function drawDurable(overview, nowMs) {
  const { durable } = overview;
  text(at("durable"), durable === null ? nothingDurable(overview.earlier.state) : durable.step === null ? durable.name : `Step ${count(durable.step)}`);
  if (durable === null) {
    text(at("durable-more"), "");
    return;
  }
  const created = epochMs(durable.created_at);
  const saved = created === null ? "" : `saved ${ago((nowMs - created) / 1000)}`;
  text(at("durable-more"), [saved, durable.by_this_pod ? "" : "by an earlier pod"].filter(Boolean).join(", "));
}

function nothingDurable(state) {
  return state === "read" ? "nothing yet" : "not known yet"; // the store may hold checkpoints of earlier pods
}

function drawCosts(overview) {
  const { kill, sigterm } = overview.safety;
  text(at("kill"), kill.lost);
  text(at("kill-more"), kill.why);
  text(at("sigterm-title"), overview.termination === null ? "A SIGTERM now costs" : "This ending costs");
  text(at("sigterm"), sigterm.lost);
  text(at("sigterm-more"), sigterm.why);
  drawBudget(overview, overview.at_risk.grows && overview.trainer.state !== null);
}

function drawBudget(overview, applies) {
  const risk = overview.at_risk;
  const budget = at("budget");
  const isKnown = applies && risk.predicted_durable_s !== null;
  show(budget, isKnown);
  if (!isKnown) return;
  const all = Math.max(overview.grace_seconds, risk.predicted_durable_s);
  const width = (seconds) => `${((100 * (seconds ?? 0)) / all).toFixed(1)}%`;
  budget.dataset.fits = risk.fits_grace;
  budget.querySelector(".save").style.width = width(risk.predicted_save_s);
  budget.querySelector(".upload").style.width = width(risk.predicted_flush_s);
  budget.querySelector("u").style.left = width(overview.grace_seconds);
  const label = `Save ${duration(risk.predicted_save_s)}, upload ${duration(risk.predicted_flush_s)}, grace period ${duration(overview.grace_seconds)}`;
  attribute(budget, "aria-label", label);
  attribute(budget, "title", label);
}

function drawCountdown(overview, elapsedS) {
  const { termination } = overview;
  show(at("ending"), termination !== null);
  if (termination === null) return;
  const leftS = termination.deadline_in_s - elapsedS;
  text(at("countdown"), leftS > 0 ? duration(Math.ceil(leftS)) : "The deadline has passed");
  text(at("countdown-more"), leftS > 0 ? `left of ${duration(termination.grace_seconds)}, after ${termination.source}` : "");
  progress(at("countdown-bar"), leftS / termination.grace_seconds, `${Math.max(0, Math.round(leftS))} seconds left`);
}

function drawPlan(overview) {
  const plan = at("plan");
  plan.replaceChildren(
    ...overview.flush.map((planned) => {
      const when = planned.predicted_s === null ? "" : `, in ${duration(planned.predicted_s)}`;
      const line = `${bytes(planned.left_bytes)} left${when}`;
      const tag = make("span", "tag", VERDICTS[planned.verdict] ?? planned.verdict);
      const row = make("li", "", null, make("b", "", planned.checkpoint), tag, make("span", "dim small", planned.reason ?? line));
      row.dataset.kind = { fits: "good", "no-time": "bad" }[planned.verdict] ?? "going";
      return row;
    }),
  );
}

function drawResume(resume) {
  const isNews = resume !== null && (!RESUME_ENDED[resume.state] || resume.passed_over.length > 0);
  show(at("resume"), isNews);
  show(at("origin-row"), resume !== null && resume.state in RESUME_ENDED);
  if (resume === null) return;
  text(at("origin"), resume.state === "ready" ? `from ${resume.checkpoint}, ${RESUME_ENDED.ready[resume.source] ?? "ready"}` : RESUME_ENDED.none);
  if (!isNews) return;
  const from = { local: "from the volume", store: "downloaded from the store" }[resume.source] ?? "";
  const sentences = {
    choosing: "Choosing the checkpoint to resume from",
    downloading: `Downloading ${resume.checkpoint}: ${bytes(resume.done_bytes)} of ${bytes(resume.total_bytes)}`,
    ready: `${resume.checkpoint} is ready, ${from}`,
    none: "Nothing to resume from: training begins at step 0",
    failed: "There is a checkpoint, and it cannot be had now",
  };
  text(at("resume-text"), (sentences[resume.state] ?? resume.state) + (resume.detail ? `. ${resume.detail}` : ""));
  show(at("resume-bar"), resume.state === "downloading" && resume.total_bytes > 0);
  if (resume.total_bytes > 0) progress(at("resume-bar"), resume.done_bytes / resume.total_bytes, `${Math.floor((100 * resume.done_bytes) / resume.total_bytes)} %`);
  texts(at("resume-passed"), resume.passed_over.map((passed) => `${passed.checkpoint} was passed over: ${passed.reason}`));
}

function drawTraining(overview, nowMs) {
  const { trainer } = overview;
  const total = trainer.total_steps;
  measureSpeed(trainer);
  text(at("step"), trainer.step === null ? "–" : `Step ${count(trainer.step)}`);
  const leftS = speed && total > trainer.step ? (total - trainer.step) / speed : null;
  text(at("step-total"), total === null ? "" : `of ${count(total)}${leftS === null || !trainer.alive ? "" : `, about ${duration(Math.round(leftS))} left`}`);
  show(at("step-bar"), total > 0 && trainer.step !== null);
  if (total > 0) progress(at("step-bar"), trainer.step / total, `step ${count(trainer.step)} of ${count(total)}`);
  text(at("trainer-state"), trainerState(trainer, nowMs));
  text(at("ranks"), trainer.world_size > trainer.ranks ? `${count(trainer.ranks)} here, ${count(trainer.world_size)} in the job` : count(trainer.ranks));
  text(at("loss"), digits(trainer.loss));
  text(at("speed"), trainer.alive ? digits(speed) : "–");
}

function trainerState(trainer, nowMs) {
  if (trainer.state === null) return trainer.alive ? "alive" : "no hook seen";
  if (trainer.state === "running" && !trainer.alive) return "has ended";
  const updated = epochMs(trainer.updated_at);
  const isQuiet = trainer.state === "running" && updated !== null && nowMs - updated > 60_000;
  return (STATES[trainer.state] ?? trainer.state) + (isQuiet ? `, last step ${ago((nowMs - updated) / 1000)}` : "");
}

function measureSpeed(trainer) {
  const at = epochMs(trainer.updated_at);
  if (trainer.step === null || at === null || (lastStep && at <= lastStep.at)) return;
  if (lastStep && trainer.step < lastStep.step) speed = null;
  else if (lastStep && at - lastStep.at < 30_000) {
    const now = (1000 * (trainer.step - lastStep.step)) / (at - lastStep.at);
    speed = speed === null ? now : 0.7 * speed + 0.3 * now;
  }
  lastStep = { at, step: trainer.step };
}

function drawUploads(overview, nowMs) {
  const { transfers } = overview;
  if (lastSample && transfers.sent_bytes >= lastSample.sent && nowMs > lastSample.at) {
    samples.push((1000 * (transfers.sent_bytes - lastSample.sent)) / (nowMs - lastSample.at));
    if (samples.length > MOST_SAMPLES) samples.shift();
  }
  lastSample = { at: nowMs, sent: transfers.sent_bytes };
  const isMeasured = transfers.throughput_bytes_per_s !== null;
  text(at("rate"), isMeasured ? rate(transfers.throughput_bytes_per_s) : "not measured");
  const limit = transfers.limit_bytes_per_s === null ? "" : `limit ${rate(transfers.limit_bytes_per_s)}`;
  text(at("rate-more"), [isMeasured ? "while sending" : "yet", limit].filter(Boolean).join(", "));
  text(at("sent"), bytes(transfers.sent_bytes));
  text(at("concurrency"), count(transfers.concurrency));
  text(at("retries"), count(transfers.retries));
  drawSpark();
}

function drawSpark() {
  const most = Math.max(...samples, 1);
  const points = samples.map((sample, index) => `${(120 - 2 * (samples.length - 1 - index)).toFixed(1)} ${(26 - (24 * sample) / most).toFixed(1)}`);
  const [area, line] = at("spark").children;
  const path = points.length > 1 ? `M${points.join("L")}` : "M118 26L120 26";
  attribute(line, "d", path);
  attribute(area, "d", points.length > 1 ? `${path}L120 28L${120 - 2 * (samples.length - 1)} 28Z` : "M0 28");
}

function drawPlaces(overview) {
  const { volume, store, lease } = overview;
  const isKnown = volume.free_bytes !== null && volume.total_bytes > 0;
  text(at("volume"), isKnown ? `${bytes(volume.free_bytes)} free of ${bytes(volume.total_bytes)}` : "cannot be read");
  show(at("volume-bar"), isKnown);
  if (isKnown) {
    const used = 1 - volume.free_bytes / volume.total_bytes;
    at("volume-bar").value = used;
    attribute(at("volume-bar"), "aria-valuetext", `${Math.round(100 * used)} % used`);
  }
  text(at("store"), store.url);
  text(at("store-more"), overview.degraded_reason !== null ? "cannot be used now" : store.reached ? `reached, uploads verified by ${store.verification}` : "not reached yet");
  show(at("lease-row"), lease.reason !== null);
  text(at("lease"), lease.reason ?? "");
}

/** Return the title of the window. */
export function title(overview) {
  const step = overview.durable?.step ?? null;
  return `${LEVELS[overview.safety.level]}${step === null ? "" : ` · step ${count(step)} durable`} · ${overview.job ?? overview.pod}`;
}

