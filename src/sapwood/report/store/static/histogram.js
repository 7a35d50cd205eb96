// How a tensor's elements are distributed.

import { get } from './api.js';
import { failure, h, replace, s } from './dom.js';
import { bytes, count, number, shape } from './format.js';

const WIDTH = 320;
const HEIGHT = 150;

export async function showHistogram(root, version, row, signal, close) {
  const content = h('div', { class: 'chart-box' }, h('p', { class: 'muted busy', text: `Reading ${bytes(row.bytes)} …` }));
  replace(root,
    h('div', { class: 'side-head' }, h('h2', { class: 'mono', title: row.name, text: row.name }),
      h('button', { type: 'button', class: 'quiet', 'data-key': 'Escape', 'aria-label': 'Close', title: 'Close (Esc)', onclick: close }, '×')),
    h('p', { class: 'muted mono small', text: `${row.dtype} · ${shape(row.shape)} · ${bytes(row.bytes)}` }), content);
  try {
    draw(content, await get('histogram', { ref: version.ref, at: row.at }, signal));
  } catch (error) {
    if (error.name !== 'AbortError') replace(content, failure(error, () => showHistogram(root, version, row, signal, close)));
  }
}

function draw(content, found) {
  if (!found.count) {
    replace(content, h('p', { class: 'empty', text: 'This tensor has no elements.' }));
    return;
  }
  if (!found.counts.length) {
    replace(content, h('p', { class: 'empty', text: 'No element is a finite number.' }), numbers(found));
    return;
  }
  const logarithmic = h('input', { type: 'checkbox' });
  const readout = h('output', { class: 'readout mono' });
  const place = h('div');
  const paint = () => replace(place, chart(found, logarithmic.checked, readout));
  logarithmic.addEventListener('change', paint);
  replace(content, place, readout, h('label', { class: 'inline' }, logarithmic, 'logarithmic counts'), found.absolute && h('p', { class: 'muted small', text: 'Complex elements: these are their absolute values.' }), numbers(found));
  paint();
}

function chart(found, logarithmic, readout) {
  const scale = (value) => (logarithmic ? Math.log1p(value) : value);
  const most = scale(Math.max(...found.counts)) || 1;
  const wide = WIDTH / found.counts.length;
  const bars = found.counts.map((value, n) => {
    const high = value ? Math.max(1.5, (scale(value) / most) * HEIGHT) : 0;
    return s('rect', { class: 'bin', x: n * wide, y: HEIGHT - high, width: Math.max(0.5, wide - (wide > 3 ? 1 : 0)), height: high });
  });
  const cursor = s('rect', { class: 'cursor', y: 0, width: wide, height: HEIGHT, x: -wide });
  const select = (n) => {
    cursor.setAttribute('x', n * wide);
    cursor.dataset.at = n;
    readout.textContent = `${range(found, n)}: ${count(found.counts[n])} (${((100 * found.counts[n]) / found.count).toPrecision(3)} %)`;
  };
  const zero = zeroAt(found);
  const picture = s('svg', { class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, tabindex: 0, role: 'img', 'data-arrows': true, 'aria-label': `Histogram of ${found.name}, ${found.counts.length} bins of ${number(found.min)} to ${number(found.max)}` },
    cursor, bars,
    s('line', { class: 'axis', x1: 0, x2: WIDTH, y1: HEIGHT + 0.5, y2: HEIGHT + 0.5 }),
    zero !== null && s('line', { class: 'zero', x1: zero, x2: zero, y1: 0, y2: HEIGHT + 4 }),
    s('text', { x: 0, y: HEIGHT + 15, text: number(found.min) }),
    zero !== null && zero > 60 && zero < WIDTH - 60 && s('text', { x: zero, y: HEIGHT + 15, 'text-anchor': 'middle', text: '0' }),
    s('text', { x: WIDTH, y: HEIGHT + 15, 'text-anchor': 'end', text: number(found.max) }));
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    return Math.min(found.counts.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * found.counts.length)));
  };
  picture.addEventListener('pointermove', (event) => select(at(event)));
  picture.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const now = cursor.dataset.at === undefined ? (by > 0 ? -1 : found.counts.length) : Number(cursor.dataset.at);
    select(Math.min(found.counts.length - 1, Math.max(0, now + by)));
  });
  readout.textContent = ' ';
  return picture;
}

function range(found, n) {
  const [low, high] = [found.edges[n], found.edges[n + 1]];
  if (found.dtype === 'bool') return low ? 'true' : 'false';
  if (found.whole && Number(high) - Number(low) === 1) return number(low);
  return `${number(low)} … ${found.whole ? '<' : ''}${number(high)}`;
}

function zeroAt(found) {
  const [low, high] = [Number(found.edges[0]), Number(found.edges.at(-1))];
  if (!(low < 0 && high > 0)) return null;
  const part = Number.isFinite(high - low) ? -low / (high - low) : 0.5;
  return part * WIDTH;
}

function numbers(found) {
  const odd = [['NaN', found.nan], ['+∞', found.posinf], ['−∞', found.neginf]].filter(([, value]) => value);
  const share = (value) => `${count(value)} (${value && value / found.count < 0.001 ? '<0.1' : ((100 * value) / found.count).toFixed(1)} %)`;
  const rows = [
    ['elements', count(found.count)],
    found.counts.length && ['min', number(found.min, 6)],
    found.counts.length && ['max', number(found.max, 6)],
    found.counts.length && [found.dtype === 'bool' ? 'share of true' : 'mean', number(found.mean, 6)],
    found.counts.length && found.dtype !== 'bool' && ['std. deviation', number(found.std, 6)],
    ['zeros', share(found.zero)],
    ...odd.map(([label, value]) => [label, share(value), 'warn']),
  ].filter(Boolean);
  return h('dl', { class: 'numbers' }, rows.map(([label, text, kind]) => [h('dt', { class: kind, text: label }), h('dd', { class: kind, text })]));
}
