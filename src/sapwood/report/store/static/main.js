// Which view is shown, and the keys that work in all of them.

import { get } from './api.js';
import { showHelp, showUnlock } from './changes.js';
import { failure, h, replace } from './dom.js';
import { showComparison } from './compare.js';
import { showList } from './list.js';
import { current } from './routes.js';
import { session } from './session.js';
import { showVersion } from './version.js';

const main = document.getElementById('main');
let leaving = new AbortController();

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const { parts, values } = current();
  document.title = 'Models · Sapwood';
  const root = h('div', { class: 'view' });
  replace(main, root);
  try {
    if (parts[0] === 'v' && parts[1]) await showVersion(root, parts[1], values, signal);
    else if (parts[0] === 'compare' && parts[2]) await showComparison(root, parts[1], parts[2], signal);
    else await showList(root, values, signal);
  } catch (error) {
    if (error.name !== 'AbortError' && !signal.aborted) replace(root, failure(error, show));
  }
}

function drawSession() {
  const place = document.getElementById('place');
  place.textContent = session.place;
  place.title = session.place;
  const lock = document.getElementById('lock');
  lock.hidden = !session.writable;
  lock.textContent = session.unlocked ? 'Changes on' : 'Read-only';
  lock.title = session.unlocked ? 'Lock changes again' : 'Enter the token to tag and remove versions';
  lock.classList.toggle('on', session.unlocked);
}

function step(by) {
  const rows = [...main.querySelectorAll('[data-row]')];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement.closest?.('tr, li')?.querySelector('[data-row]'));
  const to = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
  rows[to].focus();
  rows[to].scrollIntoView({ block: 'nearest' });
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  '/': () => main.querySelector('input[type=search]')?.focus(),
  h: () => { location.hash = '#/'; },
  '?': showHelp,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
  const inside = event.target.closest?.('input, select, textarea');
  if (event.key === 'Escape' && inside) {
    inside.blur();
    return;
  }
  if (inside && !(inside.type === 'checkbox' && event.key.length === 1 && event.key !== ' ')) return;
  if (event.target.closest?.('[data-arrows]') && event.key.startsWith('Arrow')) return;
  const call = KEYS[event.key];
  const button = main.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  const row = document.activeElement.closest?.('tr')?.querySelector(`[data-row-key="${CSS.escape(event.key)}"]`);
  if (!call && !button && !row) return;
  event.preventDefault();
  if (call) call();
  else (row ?? button).click();
}

document.addEventListener('keydown', onKey);
document.getElementById('help').addEventListener('click', showHelp);
document.getElementById('lock').addEventListener('click', () => showUnlock(show));
document.getElementById('skip').addEventListener('click', (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener('hashchange', show);
session.changed = drawSession;
try {
  session.take(await get('session'));
} catch { /* the view says what is wrong */ }
await show();
