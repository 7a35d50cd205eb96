// Numbers for people.

const UNITS = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];

export function bytes(value) {
  let number = value;
  let unit = 0;
  while (number >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || number >= 99.95 ? 0 : 1;
  return `${number.toFixed(digits)} ${UNITS[unit]}`;
}

export function count(value) {
  return typeof value === 'number' ? value.toLocaleString('en') : String(value);
}

// Metrics and elements; what JSON has no number for comes as text.
export function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (typeof value === 'string') return value === 'inf' ? '∞' : value === '-inf' ? '−∞' : value;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return count(value);
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
  return text.replace('e+', 'e').replace(/^-/, '−');
}

export function percent(share) {
  if (share === null || share === undefined) return '–';
  if (share > 0 && share < 0.01) return '<1 %';
  if (share < 1 && share > 0.99) return '>99 %';
  return `${Math.round(share * 100)} %`;
}

const STEPS = [[60, 'second', 1], [3600, 'minute', 60], [86400, 'hour', 3600],
  [30 * 86400, 'day', 86400], [365 * 86400, 'month', 30 * 86400], [Infinity, 'year', 365 * 86400]];

export function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 10) return 'just now';
  const [, unit, size] = STEPS.find(([limit]) => passed < limit);
  const whole = Math.floor(passed / size);
  return `${whole} ${unit}${whole === 1 ? '' : 's'} ago`;
}

export function moment(seconds) {
  return new Date(seconds * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'medium' });
}

export function shape(sizes) {
  return sizes.length ? sizes.join(' × ') : 'scalar';
}
