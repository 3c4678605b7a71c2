// Amounts and times as people read them. Unknown values are an en dash.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

export const count = (value) => (unknown(value) ? "–" : whole.format(value));

/** Three digits: 0.0123, 1.23, 12.3, 123. */
export function digits(value) {
  if (unknown(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return Math.abs(value) >= 100 ? whole.format(Math.round(value)) : String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  if (unknown(value)) return "–";
  let amount = value;
  let unit = 0;
  while (amount >= 999.5 && unit < UNITS.length - 1) {
    amount /= 1000;
    unit += 1;
  }
  return `${Number(amount.toPrecision(3))} ${UNITS[unit]}`;
}

export const rate = (value) => (unknown(value) ? "–" : `${bytes(value)}/s`);

/** 0.04 s, 38 s, 4 min 10 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  if (unknown(seconds)) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 9.95) return `${Number(seconds.toFixed(seconds < 0.995 ? 2 : 1))} s`;
  const total = Math.round(seconds);
  if (total < 100) return `${total} s`;
  if (total < 3600) return two(Math.floor(total / 60), "min", total % 60, "s");
  if (total < 86400) return two(Math.floor(total / 3600), "h", Math.floor((total % 3600) / 60), "min");
  return two(Math.floor(total / 86400), "d", Math.floor((total % 86400) / 3600), "h");
}

const two = (more, unit, less, smaller) => (less ? `${more} ${unit} ${less} ${smaller}` : `${more} ${unit}`);

/** 67 s ago, 95 s ago, 3 min ago, 2 h 5 min ago: from two minutes on no seconds that change. */
export function ago(seconds) {
  if (unknown(seconds)) return "at an unknown time";
  if (seconds < 1.5) return "just now";
  if (seconds < 120) return `${Math.floor(seconds)} s ago`;
  return `${duration(Math.floor(seconds / 60) * 60)} ago`;
}

/** The time of day; with the day, if that is not today. */
export function moment(epochMs, nowMs) {
  if (unknown(epochMs)) return "–";
  const then = new Date(epochMs);
  const isToday = then.toDateString() === new Date(nowMs).toDateString();
  return isToday ? clock.format(then) : `${day.format(then)} ${clock.format(then)}`;
}

export const epochMs = (stamp) => (stamp ? Date.parse(stamp) : null);
