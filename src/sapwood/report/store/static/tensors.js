// The tensors of a version, and how the elements of one are distributed.

import { get } from './api.js';
import { failure, h, later, replace } from './dom.js';
import { bytes, count, percent, shape } from './format.js';
import { showHistogram } from './histogram.js';
import { pager, sharingNote } from './parts.js';

const SIZE = 200;
const AGAIN = 1500;

export async function showTensors(root, version, signal) {
  const state = { filter: '', sort: '', offset: 0 };
  const search = h('input', { type: 'search', placeholder: 'Filter: name, dtype', 'aria-label': 'Filter tensors', title: 'Filter (/)', spellcheck: 'false' });
  const order = h('select', { 'aria-label': 'Order' }, h('option', { value: '' }, 'as saved'), h('option', { value: 'bytes' }, 'largest first'));
  const note = h('span', { class: 'muted' });
  const body = h('div', { class: 'table-box' });
  const foot = h('div', { class: 'foot' });
  const side = h('aside', { class: 'side', 'aria-label': 'Histogram', hidden: true });
  let timer = 0;
  let looking = new AbortController();
  let shown = null;
  signal.addEventListener('abort', () => {
    clearTimeout(timer);
    looking.abort();
  });

  const change = (more) => {
    Object.assign(state, { offset: 0 }, more);
    return load();
  };
  search.addEventListener('input', later(150, () => change({ filter: search.value.trim() })));
  order.addEventListener('change', () => change({ sort: order.value }));
  replace(root, h('div', { class: 'bar' }, search, order, note), h('div', { class: 'split' }, h('div', { class: 'grow' }, body, foot), side));

  function look(row) {
    if (signal.aborted) return;
    looking.abort();
    looking = new AbortController();
    shown = row.at;
    mark();
    side.hidden = false;
    showHistogram(side, version, row, looking.signal, () => {
      looking.abort();
      side.hidden = true;
      const was = body.querySelector(`[data-at="${shown}"]`);
      shown = null;
      mark();
      was?.focus();
    });
  }

  function mark() {
    for (const button of body.querySelectorAll('[data-at]')) {
      const on = Number(button.getAttribute('data-at')) === shown;
      button.setAttribute('aria-pressed', String(on));
      button.closest('tr').classList.toggle('on', on);
    }
  }

  async function load() {
    clearTimeout(timer);
    if (signal.aborted) return;
    try {
      const found = await get('tensors', { ref: version.ref, ...state, limit: SIZE }, signal);
      if (!root.contains(body)) return;
      const focused = body.contains(document.activeElement) ? document.activeElement.getAttribute('data-at') : null;
      replace(body, found.rows.length ? table(found, look) : h('p', { class: 'empty', text: found.all ? 'Nothing fits.' : 'This version holds no tensors.' }));
      if (focused) body.querySelector(`[data-at="${focused}"]`)?.focus();
      mark();
      const known = found.share !== null && found.share !== undefined;
      note.textContent = sharingNote(found.sharing) || (known ? `${percent(found.share)} of its bytes in common with other versions` : '');
      replace(foot, found.total > SIZE && pager(found, SIZE, (offset) => change({ offset })));
      if (found.sharing.supported && (!found.sharing.complete || !known)) timer = setTimeout(load, AGAIN);
    } catch (error) {
      if (error.name !== 'AbortError') replace(body, failure(error, load));
    }
  }
  await load();
}

function table(found, look) {
  return h('table', { class: 'tensors' },
    h('thead', null, h('tr', null, [['Tensor', 'wide'], ['dtype', ''], ['Shape', ''], ['Size', 'num'], ['In other versions', 'num']].map(([label, kind]) => h('th', { class: kind, scope: 'col' }, label)))),
    h('tbody', null, found.rows.map((row) => h('tr', null,
      h('td', { class: 'wide' }, h('button', { type: 'button', class: 'link mono', 'data-row': true, 'data-at': row.at, title: row.name, onclick: () => look(row) }, name(row.name)), row.tied !== null && h('span', { class: 'badge', title: `the same tensor as ${row.tied}`, text: 'tied' })),
      h('td', { class: 'mono dim', text: row.dtype }),
      h('td', { class: 'mono nowrap', text: shape(row.shape) }),
      h('td', { class: 'num nowrap' }, h('span', { class: 'meter', vars: { '--part': found.largest ? row.bytes / found.largest : 0 } }, h('span', { text: bytes(row.bytes) }))),
      h('td', { class: `num${row.others ? '' : ' muted'}`, text: others(row, found.sharing) })))));
}

function others(row, sharing) {
  if (!sharing.supported) return 'n/a';
  if (!row.bytes) return '–';
  if (row.others === null) return '…';
  return row.others ? count(row.others) : 'none';
}

// The module is paler than the tensor in it.
function name(text) {
  const cut = text.lastIndexOf('.') + 1;
  return [cut ? h('span', { class: 'dim', text: text.slice(0, cut) }) : null, h('span', { text: text.slice(cut) || text })];
}
