"use strict";
// Functions of curves: x is an array of positions, which grow, and y of the values, which are NaN where there is a gap.
const curves = {
  // The numbers of an array of 64-bit floats in base64.
  decoded: (text) => new Float64Array(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer),

  // Index of the first position that is at least `position`.
  first(x, position) {
    let low = 0, high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < position) low = middle + 1; else high = middle;
    }
    return low;
  },

  nearest(x, position) {
    const after = Math.min(curves.first(x, position), x.length - 1);
    return after > 0 && position - x[after - 1] <= x[after] - position ? after - 1 : after;
  },

  // The value at a position between those of x, or NaN outside.
  interpolated(x, y, position) {
    const after = curves.first(x, position);
    if (x[after] === position) return y[after];
    if (after === 0 || after === x.length) return NaN;
    const share = (position - x[after - 1]) / (x[after] - x[after - 1]);
    return y[after - 1] + share * (y[after] - y[after - 1]);
  },

  // Smallest, largest and mean value of each of at most `count` groups of neighbours, at the last position of each group. Gaps do
  // not count.
  grouped(x, y, count) {
    const groups = Math.floor(Math.min(count, x.length)), found = { x: [], low: [], high: [], mean: [] };
    for (let group = 0, i = 0; group < groups; group++) {
      const end = Math.floor((group + 1) * x.length / groups);
      let low = Infinity, high = -Infinity, sum = 0, values = 0;
      for (; i < end; i++) {
        if (!Number.isFinite(y[i])) continue;
        low = Math.min(low, y[i]); high = Math.max(high, y[i]); sum += y[i]; values++;
      }
      found.x.push(x[end - 1]);
      found.low.push(values ? low : NaN); found.high.push(values ? high : NaN); found.mean.push(values ? sum / values : NaN);
    }
    return found;
  },

  // Mean of each value and its neighbours, `window` in all; fewer at the ends. Gaps do not count, and stay.
  moving(y, window) {
    const before = Math.floor((window - 1) / 2), after = window - 1 - before, means = new Float64Array(y.length);
    const finite = (i) => (Number.isFinite(y[i]) ? 1 : 0);
    let sum = 0, values = 0;
    const add = (i, sign) => { if (finite(i)) { sum += sign * y[i]; values += sign; } };
    for (let i = 0; i < Math.min(after, y.length); i++) add(i, 1);
    for (let i = 0; i < y.length; i++) {
      if (i + after < y.length) add(i + after, 1);
      means[i] = finite(i) ? sum / values : NaN;
      if (i - before >= 0) add(i - before, -1);
    }
    return means;
  },

  // The values without single spikes: those that are above, or below, the values before and after them by many times the usual
  // distance. The steep beginning of a loss is no spike.
  withoutSpikes(y) {
    const values = y.filter(Number.isFinite), reach = 4;
    const median = (part) => Float64Array.from(part).sort()[part.length >> 1];
    const distances = Float64Array.from(values, (value, i) => {
      if (i === 0) return 0;
      const before = value - median(values.slice(Math.max(0, i - reach), i));
      const after = i + 1 < values.length ? value - median(values.slice(i + 1, i + 1 + reach)) : before;
      return before * after > 0 ? Math.min(Math.abs(before), Math.abs(after)) : 0;
    });
    const usual = distances.slice().sort()[Math.floor(0.9 * (distances.length - 1))];
    return values.filter((_, i) => distances[i] <= 8 * usual);
  },

  // The ends of a vertical axis for values. Equal values are in the middle of a range that does not change their sign.
  range(values, isLog) {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low > high) return { start: 0, end: 1 };
    if (isLog) {
      const factor = low === high ? 2 : (high / low) ** 0.05;
      return { start: low / factor, end: high * factor };
    }
    const pad = low === high ? 0.1 * Math.abs(low) || 1 : 0.05 * (high - low);
    return { start: low >= 0 ? Math.max(0, low - pad) : low - pad, end: high < 0 ? Math.min(0, high + pad) : high + pad };
  },
};
