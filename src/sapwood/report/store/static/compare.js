// How two versions differ, tensor by tensor.

import { get, lines } from './api.js';
import { failure, h, replace } from './dom.js';
import { bytes, count, number, percent } from './format.js';
import { pager, reference } from './parts.js';
import { compareAddress } from './routes.js';

const SIZE = 200;
const KINDS = ['changed', 'reshaped', 'added', 'removed', 'same'];

export async function showComparison(root, before, after, signal) {
  document.title = `${before} → ${after} · Sapwood`;
  const stop = new AbortController();
  signal.addEventListener('abort', () => stop.abort());
  const ends = h('h1', { class: 'ends' }, h('code', { text: before }), ' → ', h('code', { text: after }));
  const body = h('div', null, h('p', { class: 'muted busy', text: 'Comparing …' }));
  const again = () => showComparison(root, before, after, signal);
  replace(root, h('div', { class: 'head' }, ends, h('div', { class: 'actions' },
    h('a', { class: 'button', href: compareAddress(after, before) }, 'Swap'))), body);
  const bar = h('progress', { max: 1, 'aria-label': 'Compared' });
  const text = h('p', { class: 'muted mono small' });
  let found = null;
  try {
    for await (const line of lines('compare', { before, after }, stop.signal)) {
      if (line.error) throw new Error(line.error);
      if (line.before) replace(ends, reference(line.before), ' → ', reference(line.after));
      if (line.found) found = line;
      else if (line.total) {
        if (!bar.isConnected) replace(body, h('div', { class: 'progress' }, bar, h('button', { type: 'button', 'data-key': 'Escape', onclick: () => stop.abort() }, 'Cancel')), text);
        bar.value = line.done / line.total;
        text.textContent = `${bytes(line.done)} of ${bytes(line.total)} · ${line.what}`;
      }
    }
    if (!found) throw new Error('The comparison ended too early.');
    await showFound(body, before, after, found.found, signal);
  } catch (error) {
    if (signal.aborted) return;
    const cancelled = error.name === 'AbortError';
    replace(body, failure(cancelled ? new Error('Cancelled.') : error, again));
  }
}

async function showFound(body, before, after, totals, signal) {
  if (totals.same === totals.tensors) {
    replace(body, h('p', { class: 'empty', text: `All ${count(totals.tensors)} tensors are the same, bit for bit.` }));
    return;
  }
  const state = { kind: '', sort: totals.changed ? 'relative' : '', offset: 0 };
  const table = h('div', { class: 'table-box' });
  const foot = h('div', { class: 'foot' });
  const chips = KINDS.filter((kind) => totals[kind]).map((kind) => h('button', { type: 'button', class: `chip ${kind}`, 'aria-pressed': 'false', onclick: (event) => {
    state.kind = state.kind === kind ? '' : kind;
    for (const chip of chips) chip.setAttribute('aria-pressed', String(chip === event.currentTarget && state.kind === kind));
    load(0);
  } }, h('strong', { text: count(totals[kind]) }), ` ${kind}`));
  const order = h('select', { 'aria-label': 'Order', onchange: () => { state.sort = order.value; load(0); } },
    [['relative', 'by relative difference'], ['largest', 'by largest difference'], ['', 'in the order of the model']].map(([value, label]) => h('option', { value, selected: value === state.sort }, label)));
  replace(body, h('div', { class: 'bar' }, h('div', { class: 'chips', role: 'group', 'aria-label': 'Show only' }, chips), order), table, foot);

  async function load(offset) {
    state.offset = offset;
    try {
      const found = await get('differences', { before, after, ...state, limit: SIZE }, signal);
      replace(table, rows(found));
      replace(foot, found.total > SIZE ? pager(found, SIZE, load) : h('span', { class: 'range', text: `${count(found.total)} tensors` }),
        h('span', { class: 'muted', text: 'relative: norm of the difference by norm before' }));
    } catch (error) {
      if (error.name !== 'AbortError') replace(table, failure(error, () => load(offset)));
    }
  }
  await load(0);
}

function rows(found) {
  return h('table', { class: 'differences' },
    h('thead', null, h('tr', null, [['Tensor', 'wide'], ['Change', ''], ['Relative', 'num'], ['Largest', 'num'], ['Elements', 'num']].map(([label, kind]) => h('th', { class: kind, scope: 'col' }, label)))),
    h('tbody', null, found.rows.map((row) => h('tr', null,
      h('td', { class: 'wide mono', tabindex: -1, 'data-row': true, title: row.name, text: row.name }),
      h('td', null, h('span', { class: `kind ${row.kind}`, text: row.kind }), row.kind !== 'changed' && row.kind !== 'same' && h('span', { class: 'muted mono small', text: ` ${type(row)}` })),
      row.kind === 'changed' ? changed(row, found.most) : [h('td'), h('td'), h('td')]))));
}

function changed(row, most) {
  // Each tenth of the bar is half of what is above: differences span many powers of ten.
  const part = row.relative === 'inf' ? 1 : row.relative && most ? Math.max(0.03, 1 + Math.log2(row.relative / most) / 10) : 0;
  return [
    h('td', { class: 'num nowrap' }, h('span', { class: 'meter', vars: { '--part': part }, title: row.relative === 'inf' ? 'it was zero before' : 'the bar is logarithmic' }, h('span', { text: number(row.relative, 3) }))),
    h('td', { class: 'num', text: number(row.largest, 3) }),
    h('td', { class: 'num nowrap' }, percent(row.elements / row.count), row.odd > 0 && h('span', { class: 'badge warn', title: 'NaN or infinite on either side; not in the other numbers', text: `${count(row.odd)} not finite` })),
  ];
}

function type(row) {
  if (row.kind === 'added') return row.after;
  if (row.kind === 'removed') return row.before;
  return `${row.before} → ${row.after}`;
}
