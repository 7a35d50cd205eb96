// All versions, or all models: filtered, sorted, a page at a time.

import { get } from './api.js';
import { failure, h, later, replace } from './dom.js';
import { bytes, count, number } from './format.js';
import { pager, reference, share, sharingNote, tags, when } from './parts.js';
import { amend, compareAddress, listAddress } from './routes.js';
import { chosen } from './session.js';

const SIZE = 100;
const AGAIN = 1500;

export async function showList(root, values, signal) {
  const state = { view: 'versions', sort: 'created', order: 'desc', offset: 0, filter: '', ...values };
  if (state.view !== 'models') state.view = 'versions';
  const search = h('input', { type: 'search', value: state.filter, placeholder: 'Filter: name, tag:best, val_acc>0.9', 'aria-label': 'Filter', title: 'Filter (/)', spellcheck: 'false' });
  const body = h('div', { class: 'table-box' });
  const foot = h('div', { class: 'foot' });
  const compare = h('div', { class: 'choice', hidden: true });
  let timer = 0;
  let asking = new AbortController();
  signal.addEventListener('abort', () => {
    clearTimeout(timer);
    asking.abort();
  });

  const change = (more) => {
    if (signal.aborted) return undefined; // typed just before another view was opened
    Object.assign(state, more);
    if (!('offset' in more)) state.offset = 0;
    amend(listAddress({ ...state, view: state.view === 'models' ? 'models' : '', offset: state.offset || '' }));
    return load();
  };
  const views = ['versions', 'models'].map((view) => h('button', {
    type: 'button', 'aria-pressed': String(state.view === view), onclick: () => {
      for (const button of views) button.setAttribute('aria-pressed', String(button.textContent.toLowerCase() === view));
      change({ view, sort: state.sort === 'count' ? 'created' : state.sort });
    },
  }, view === 'versions' ? 'Versions' : 'Models'));
  search.addEventListener('input', later(200, () => change({ filter: search.value.trim() })));
  search.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') body.querySelector('[data-row]')?.focus();
  });
  replace(root, h('div', { class: 'bar' }, h('div', { class: 'switch', role: 'group', 'aria-label': 'What is listed' }, views), search), body, foot, compare);

  async function load({ quietly = false } = {}) {
    clearTimeout(timer);
    if (signal.aborted) return;
    asking.abort();
    asking = new AbortController();
    const own = asking.signal;
    if (!quietly) body.setAttribute('aria-busy', 'true');
    try {
      const { view, ...rest } = state;
      const found = await get(view, { ...rest, limit: SIZE }, own);
      if (!found.rows.length && found.total && state.offset) {
        change({ offset: 0 });
        return;
      }
      const focused = body.contains(document.activeElement) ? document.activeElement.getAttribute('href') : null;
      replace(body, found.rows.length ? table(found, state, change, drawChoice) : empty(found, state));
      if (focused) body.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
      replace(foot, found.total > SIZE ? pager(found, SIZE, (offset) => { change({ offset }); scrollTo(0, 0); }) : h('span', { class: 'range', text: `${count(found.total)} ${found.total === 1 ? state.view.slice(0, -1) : state.view}` }),
        h('span', { class: 'muted', text: sharingNote(found.sharing) }));
      if (found.sharing.supported && !found.sharing.complete) timer = setTimeout(() => load({ quietly: true }), AGAIN);
    } catch (error) {
      if (error.name !== 'AbortError') replace(body, failure(error, load));
    }
    if (asking.signal === own) body.removeAttribute('aria-busy');
  }

  function drawChoice() {
    const [before, after] = chosen.refs;
    compare.hidden = !before;
    if (!before) return;
    replace(compare, h('span', { class: 'refs' }, h('code', { text: before }), after ? h('span', null, ' → ', h('code', { text: after })) : h('span', { class: 'muted', text: ' and one more' })),
      h('span', { class: 'spring' }),
      h('button', { type: 'button', onclick: () => { chosen.refs = []; load({ quietly: true }); drawChoice(); } }, 'Clear'),
      h('button', { type: 'button', class: 'main', 'data-key': 'c', disabled: !after, title: 'Compare (c)', onclick: () => { location.hash = compareAddress(before, after); } }, 'Compare'));
  }

  drawChoice();
  await load();
}

function empty(found, state) {
  if (found.all) return h('p', { class: 'empty', text: `Nothing fits ${state.filter}.` });
  return h('div', { class: 'empty' }, h('p', { text: 'This repository is empty.' }),
    h('p', null, h('code', { text: 'sapwood store put weights.safetensors name@version' })));
}

function table(found, state, change, drawChoice) {
  const models = state.view === 'models';
  const columns = [
    ['name', models ? 'Model, latest version' : 'Version', 'wide'],
    models && ['count', 'Versions', 'num'],
    ['created', 'Saved', ''],
    ['bytes', 'Size', 'num'],
    ['tensors', 'Tensors', 'num low'],
    [null, 'In common', 'low', 'how much of its bytes other versions have, too'],
    ...found.columns.map((key) => [`metric:${key}`, key, 'num metric']),
  ].filter(Boolean);
  return h('table', { class: 'list' },
    h('thead', null, h('tr', null, !models && h('th', { class: 'pick', scope: 'col' }, h('span', { class: 'only-read', text: 'Choose' })),
      columns.map(([sort, label, kind, title]) => head(sort, label, kind, title, state, change)))),
    h('tbody', null, found.rows.map((row) => line(row, found, models, change, drawChoice))));
}

function head(sort, label, kind, title, state, change) {
  if (!sort) return h('th', { class: kind, scope: 'col', title }, label);
  const on = state.sort === sort;
  const up = state.order === 'asc';
  const order = on ? (up ? 'desc' : 'asc') : (sort === 'name' ? 'asc' : 'desc');
  // Before the label of numbers, so that label and numbers end at the same place.
  const parts = [h('span', { class: 'label', text: label }), h('span', { class: 'arrow', 'aria-hidden': 'true', text: on ? (up ? '↑' : '↓') : '' })];
  if (kind.includes('num')) parts.reverse();
  return h('th', { class: kind, scope: 'col', 'aria-sort': on ? (up ? 'ascending' : 'descending') : undefined },
    h('button', { type: 'button', class: 'sort', title: `Sort by ${label}`, onclick: () => change({ sort, order }) }, parts));
}

function line(row, found, models, change, drawChoice) {
  const pick = h('input', { type: 'checkbox', 'data-row-key': 'x', 'aria-label': `Choose ${row.ref} for comparison`, onchange: (event) => {
    chosen.toggle(row.ref);
    for (const box of event.target.closest('tbody').querySelectorAll('input[data-row-key]')) box.checked = chosen.has(box.getAttribute('data-ref'));
    drawChoice();
  }, 'data-ref': row.ref });
  pick.checked = chosen.has(row.ref);
  return h('tr', null,
    !models && h('td', { class: 'pick' }, pick),
    h('td', { class: 'wide' }, h('div', { class: 'cell' }, reference(row, { 'data-row': true }), tags(row))),
    models && h('td', { class: 'num' }, h('button', { type: 'button', class: 'link', title: `List the versions of ${row.name}`, onclick: () => { location.hash = listAddress({ filter: `name:${row.name}` }); } }, count(row.count))),
    h('td', { class: 'nowrap' }, when(row.created)),
    h('td', { class: 'num nowrap', text: bytes(row.bytes) }),
    h('td', { class: 'num low', text: count(row.tensors) }),
    h('td', { class: 'low' }, share(row.share, found.sharing)),
    row.metrics.map((value) => h('td', { class: `num metric${value === null ? ' muted' : ''}`, text: number(value) })));
}
