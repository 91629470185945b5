// The last minutes of GET /stats, and what follows from the difference of two answers.

export const WINDOW = 300; // seconds that are kept
const SHOWN = [60, 120, WINDOW]; // seconds that charts show, as soon as there are as many
const RATE_SPAN = 3; // seconds over which a rate is taken
const LONG_SPAN = 10; // and a share or a quantile, which few events would make jump

/** Answers of GET /stats, oldest first, and a point of derived numbers for each. */
export class History {
  constructor() {
    this.samples = [];
    this.points = [];
  }

  get last() {
    return this.points.at(-1) ?? null;
  }

  /** How many seconds the charts show. */
  get shown() {
    const age = this.points.length ? this.last.t - this.points[0].t : 0;
    return SHOWN.find((span) => age <= span) ?? WINDOW;
  }

  /** Keep an answer, and return its point. */
  add(stats) {
    this.samples.push(stats);
    const point = derive(stats, this.#before(RATE_SPAN), this.#before(LONG_SPAN));
    this.points.push(point);
    while (this.samples[0].time < stats.time - WINDOW - LONG_SPAN) {
      this.samples.shift();
      this.points.shift();
    }
    return point;
  }

  /** The point nearest to a time; null if there is none within two seconds. */
  at(time) {
    let best = null;
    for (const point of this.points) {
      if (!best || Math.abs(point.t - time) < Math.abs(best.t - time)) best = point;
    }
    return best && Math.abs(best.t - time) < 2 ? best : null;
  }

  // The newest sample that is at least `span` seconds older than the last; else the oldest one.
  #before(span) {
    const now = this.samples.at(-1).time;
    return this.samples.findLast((one) => one.time <= now - span + 0.2) ?? this.samples[0];
  }
}

function derive(now, recent, earlier) {
  const value = (name) => now.values[name] ?? null;
  const rate = (name) => perSecond(now.time - recent.time, grown(now.values[name], recent.values[name]));
  const growth = (name) => grown(now.values[name], earlier.values[name]);
  const sum = (counts) => counts && Object.values(counts).reduce((all, one) => all + one, 0);
  const rateOf = (name) => perSecond(now.time - recent.time, grown(sum(now.values[name]), sum(recent.values[name])));
  const total = value("kv_blocks_total");
  const share = (name) => (total ? (100 * (value(name) ?? 0)) / total : null);
  const used = share("kv_blocks_used"), cached = share("kv_blocks_cached");
  return {
    t: now.time,
    generated: rate("generation_tokens"),
    prompt: rate("prompt_tokens"),
    graphed: rateOf("graph_replays"),
    eager: rateOf("graph_fallbacks"),
    steps: rate("num_steps"),
    restarts: value("engine_restarts"),
    ...quantiles("first", "time_to_first_token_seconds", now, earlier),
    ...quantiles("between", "inter_token_latency_seconds", now, earlier),
    running: value("num_requests_running"),
    waiting: value("num_requests_waiting"),
    used, cached,
    free: total ? 100 - used - cached : null,
    hits: percent(growth("prefix_cache_hits"), growth("prefix_cache_queries")),
    accepted: percent(growth("spec_decode_num_accepted_tokens"), growth("spec_decode_num_draft_tokens")),
    drafts: rate("spec_decode_num_draft_tokens"),
    ...ratesOf("lora_generation_tokens", now, recent),
  };
}

function quantiles(name, metric, now, earlier) {
  const last = now.histograms[metric], before = earlier.histograms[metric];
  if (!last || !before) return { [`${name}50`]: null, [`${name}99`]: null };
  const counts = last.counts.map((count, index) => count - before.counts[index]);
  return {
    [`${name}50`]: quantile(0.5, last.bounds, counts),
    [`${name}99`]: quantile(0.99, last.bounds, counts),
  };
}

/** A quantile of cumulative counts, linear within a bucket; above the last bound, that bound. */
export function quantile(share, bounds, counts) {
  const all = counts.at(-1);
  if (!(all > 0)) return null;
  const wanted = share * all;
  const index = counts.findIndex((count) => count >= wanted);
  if (index >= bounds.length) return bounds.at(-1);
  const low = index ? bounds[index - 1] : 0, below = index ? counts[index - 1] : 0;
  return low + ((bounds[index] - low) * (wanted - below)) / (counts[index] - below);
}

/** The key of an adapter's tokens a second. */
export const adapterKey = (name) => `adapter ${name}`;

/** How much each value of a metric's label has grown a second. */
function ratesOf(name, now, earlier) {
  const last = now.values[name] ?? {}, before = earlier.values[name] ?? {};
  return Object.fromEntries(Object.entries(last).map(([label, value]) =>
    [adapterKey(label), perSecond(now.time - earlier.time, grown(value, before[label] ?? 0))]));
}

// A counter that fell belongs to an engine that has started again.
const grown = (now, before) => (now == null || before == null || now < before ? null : now - before);
const perSecond = (seconds, growth) => (growth === null || seconds <= 0 ? null : growth / seconds);
const percent = (part, whole) => (part === null || !whole ? null : (100 * part) / whole);
