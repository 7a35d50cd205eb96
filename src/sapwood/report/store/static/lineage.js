// The versions around one, newest at the top: lines lead down from each to what it comes from.

import { get } from './api.js';
import { failure, h, replace, s } from './dom.js';
import { bytes, count, number } from './format.js';
import { reference, tags, when } from './parts.js';
import { compareAddress, versionAddress } from './routes.js';

const ROW = 52;
const LANE = 20;
const WIDEST = 260;

export async function showLineage(root, version, signal) {
  let found;
  try {
    found = await get('lineage', { ref: version.ref }, signal);
  } catch (error) {
    if (error.name !== 'AbortError') replace(root, failure(error, () => showLineage(root, version, signal)));
    return;
  }
  const { places, lanes } = layOut(found.nodes);
  const lane = Math.min(LANE, WIDEST / lanes);
  const wide = Math.ceil(lanes * lane) + 14;
  replace(root,
    found.truncated && h('p', { class: 'muted', text: `The ${count(found.nodes.length)} versions nearest to this one; open another one to see what is around it.` }),
    h('div', { class: 'lineage', vars: { '--graph': `${wide}px`, '--row': `${ROW}px` } },
      picture(found, places, lane, wide),
      h('ol', null, found.nodes.map((node) => label(node, found.id, version)))),
    found.nodes.length === 1 && h('p', { class: 'muted', text: 'Nothing was saved with this version as its parent, and it has none: save(…, parent=…) makes the link.' }));
  root.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest' });
}

// A lane is a column in which a line leads down to a parent that is still to come.
function layOut(nodes) {
  const waiting = [];
  const places = new Map();
  nodes.forEach((node, row) => {
    const mine = waiting.flatMap((id, n) => (id === node.id ? [n] : []));
    let at = mine[0] ?? waiting.indexOf(null);
    if (at < 0) at = waiting.length;
    for (const n of mine) waiting[n] = null;
    waiting[at] = node.parent;
    places.set(node.id, { row, at });
  });
  return { places, lanes: Math.max(1, waiting.length) };
}

function picture(found, places, lane, wide) {
  const x = (at) => 10 + at * lane;
  const y = (row) => row * ROW + 18;
  const edges = [];
  const dots = [];
  for (const node of found.nodes) {
    const { row, at } = places.get(node.id);
    const to = node.parent ? places.get(node.parent) : null;
    if (to) edges.push(s('path', { class: `edge lane${at % 6}`, d: path(x(at), y(row), x(to.at), y(to.row)) }));
    else if (node.more_above) edges.push(s('path', { class: 'edge more', d: `M${x(at)} ${y(row)}V${y(row) + ROW * 0.6}` }));
    const gone = node.removed !== null;
    dots.push(s('circle', { class: `dot lane${at % 6}${gone ? ' gone' : ''}${node.id === found.id ? ' here' : ''}`, cx: x(at), cy: y(row), r: node.id === found.id ? 7 : 5 }));
  }
  const high = found.nodes.length * ROW;
  return s('svg', { class: 'graph', width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: 'img', 'aria-label': `Lineage of ${found.nodes.length} versions` }, edges, dots);
}

function path(x1, y1, x2, y2) {
  if (x1 === x2) return `M${x1} ${y1}V${y2}`;
  const bend = y2 - ROW;
  const start = bend > y1 ? `V${bend}` : '';
  const from = Math.max(bend, y1);
  return `M${x1} ${y1}${start}C${x1} ${from + ROW * 0.6} ${x2} ${y2 - ROW * 0.6} ${x2} ${y2}`;
}

function label(node, here, version) {
  const gone = node.removed !== null;
  const self = node.id === here;
  return h('li', { class: `${gone ? 'gone' : ''}${self ? ' here' : ''}`, 'aria-current': self ? 'true' : undefined },
    h('div', { class: 'first' }, reference(node, { 'data-row': true, href: versionAddress(node.ref, { tab: 'lineage' }) }),
      gone && h('span', { class: 'badge gone', text: 'removed' }),
      !gone && !self && h('a', { class: 'aside', href: compareAddress(node.ref, version.ref), title: `Compare ${node.ref} with ${version.ref}`, text: 'compare' })),
    h('div', { class: 'second' },
      h('span', { class: 'muted nowrap' }, when(node.created), ` · ${bytes(node.bytes)}`, node.metrics.map(([key, value]) => ` · ${key} ${number(value)}`)),
      tags(node)));
}
