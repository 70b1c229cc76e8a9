// Numbers as a person reads them. One unit per figure and per table column, never mixed.

export const DASH = "–";
const SPACE = "\u2009"; // thin, between thousands

const TIME = [["µs", 1], ["ms", 1e3], ["s", 1e6]];
const BYTES = [["B", 1], ["KiB", 1024], ["MiB", 1024 ** 2], ["GiB", 1024 ** 3], ["TiB", 1024 ** 4]];
const FLOPS = [["FLOP/s", 1], ["GFLOP/s", 1e9], ["TFLOP/s", 1e12]];
const FIXED = { share: ["%", 0.01], mhz: ["MHz", 1], w: ["W", 1], celsius: ["°C", 1], factor: ["×", 1], per_s: ["/s", 1] };
const JOULES = [["mJ", 1e-3], ["J", 1], ["kJ", 1e3]];
const LADDERS = { us: TIME, bytes: BYTES, flop_per_s: FLOPS, j: JOULES };

/** The unit for values up to `largest`, and what they are divided by: {label, divisor}. */
export function scale(unit, largest) {
  if (FIXED[unit]) return { label: FIXED[unit][0], divisor: FIXED[unit][1] };
  const ladder = LADDERS[unit];
  if (!ladder) return { label: "", divisor: 1 };
  let [label, divisor] = ladder[0];
  for (const [l, d] of ladder) if (largest >= d) [label, divisor] = [l, d];
  return { label, divisor };
}

/** At least three significant digits, no exponent. */
export function digits(value) {
  const size = Math.abs(value);
  const decimals = size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return grouped(value.toFixed(decimals));
}

function grouped(text) {
  const [whole, fraction] = text.split(".");
  const thousands = whole.replace(/\B(?=(\d{3})+(?!\d))/g, SPACE);
  return fraction ? `${thousands}.${fraction}` : thousands;
}

/** A number of a column whose scale is known; without the unit. */
export function cell(value, unit, divisor) {
  if (value === null || value === undefined || value === "") return DASH;
  if (typeof value === "string") return value;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (unit === "count" || unit === "") return Number.isInteger(value) ? grouped(String(value)) : digits(value);
  if (unit === "share") return (100 * value).toFixed(1);
  if (unit === "us") return fixed(value / divisor);
  return digits(value / divisor);
}

// Columns of times keep their decimals aligned; only what would be lost gets more of them.
function fixed(value) {
  const size = Math.abs(value);
  if (size > 0 && size < 0.1) return value.toFixed(Math.min(6, 1 - Math.floor(Math.log10(size))));
  return grouped(value.toFixed(size >= 1e5 ? 0 : size >= 1e3 ? 1 : 2));
}

/** A sentence whose numbers keep their units on the same line. */
export const unbroken = (text) => text.replace(/(\d) (?=(%|µs|ms|s|×|MHz|W|J|mJ|kJ|°C)(\W|$))/g, "$1\u00a0");

/** A single number with its unit, which suits `largest` where that is given. */
export function quantity(value, unit, largest = Math.abs(value)) {
  if (value === null || value === undefined) return { text: DASH, unit: "" };
  if (typeof value === "string") return { text: value, unit: "" };
  if (unit === "count") return { text: Number.isInteger(value) ? grouped(String(value)) : digits(value), unit: "" };
  if (unit === "share") return { text: sharePercent(value), unit: "%" };
  // What would vanish in the common unit keeps its own.
  const common = scale(unit, largest);
  const { label, divisor } = value !== 0 && Math.abs(value) < 0.005 * common.divisor ? scale(unit, Math.abs(value)) : common;
  return { text: digits(value / divisor), unit: label };
}

function sharePercent(value) {
  const percent = 100 * value;
  if (percent >= 99.5 && percent < 100) return Math.min(percent, 99.9).toFixed(1); // not all of it
  return percent !== 0 && Math.abs(percent) < 9.95 ? percent.toFixed(1) : percent.toFixed(0);
}

export function bytes(value) {
  const { text, unit } = quantity(value, "bytes");
  return `${text} ${unit}`;
}
