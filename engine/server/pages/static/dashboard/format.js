// Numbers for people.

export const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (value) => (value == null ? NONE : whole.format(value));
export const rate = (value) => (value == null ? NONE : (value < 10 ? tenth : whole).format(value));
export const percent = (value) => (value == null ? NONE : `${(value < 10 ? tenth : whole).format(value)} %`);

/** Seconds, with three digits and the unit that fits. */
export function seconds(value) {
  if (value == null) return NONE;
  if (value >= 60) return `${whole.format(value)} s`;
  const [scaled, unit] = value >= 1 ? [value, "s"] : value >= 1e-3 ? [value * 1e3, "ms"] : [value * 1e6, "µs"];
  const digits = scaled === 0 || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  return `${Number(scaled.toFixed(digits))} ${unit}`;
}

/** What a size of a CUDA graph means: the server names those of plain decode steps by rows alone. */
export const graphName = (size) => size.replace(/^(\d+)(?=$|, )/, (all, rows) => `${rows} row${rows === "1" ? "" : "s"}`);

/** Bytes in MiB or GiB. */
export function bytes(value) {
  return value >= 2 ** 30 ? `${tenth.format(value / 2 ** 30)} GiB` : `${tenth.format(value / 2 ** 20)} MiB`;
}

/** The time of day of a Unix time. */
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
