// One version: what is known of it, its tensors, and the versions around it.

import { get } from './api.js';
import { removeTag, showRemove, showTag } from './changes.js';
import { h, replace } from './dom.js';
import { bytes, count, number } from './format.js';
import { showLineage } from './lineage.js';
import { reference, tags, when } from './parts.js';
import { amend, compareAddress, listAddress, versionAddress } from './routes.js';
import { session } from './session.js';
import { showTensors } from './tensors.js';

export async function showVersion(root, ref, values, signal) {
  const version = await get('version', { ref }, signal);
  document.title = `${version.ref} · Sapwood`;
  const again = () => { root.isConnected && showVersion(root, version.ref, values, signal); };
  const panel = h('div', { class: 'panel', role: 'tabpanel' });
  const tabs = [['tensors', `Tensors`, count(version.names)], ['lineage', 'Lineage', ''], ...(version.note ? [['note', 'Note', '']] : [])];
  const buttons = tabs.map(([key, label, more]) => h('button', { type: 'button', role: 'tab', 'data-tab': key, onclick: () => open(key) }, label, more && h('span', { class: 'badge', text: more })));
  replace(root, header(version, again), facts(version),
    h('div', { class: 'tabs', role: 'tablist', 'data-arrows': true, onkeydown: (event) => moveTab(event, buttons) }, buttons), panel);

  let leaving = new AbortController();
  signal.addEventListener('abort', () => leaving.abort());

  async function open(key) {
    leaving.abort(); // what the other tab was reading
    leaving = new AbortController();
    for (const button of buttons) {
      const on = button.getAttribute('data-tab') === key;
      button.setAttribute('aria-selected', String(on));
      button.tabIndex = on ? 0 : -1;
    }
    amend(versionAddress(version.ref, { tab: key === 'tensors' ? '' : key }));
    replace(panel);
    if (key === 'lineage') await showLineage(panel, version, leaving.signal);
    else if (key === 'note') replace(panel, h('pre', { class: 'note', text: version.note }));
    else await showTensors(panel, version, leaving.signal);
  }
  await open(tabs.some(([key]) => key === values.tab) ? values.tab : 'tensors');
}

function moveTab(event, buttons) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const to = buttons[(buttons.indexOf(event.target) + by + buttons.length) % buttons.length];
  to?.focus();
  to?.click();
}

function header(version, again) {
  const changes = session.unlocked && [
    h('button', { type: 'button', onclick: () => showTag(version, again) }, 'Tag…'),
    h('button', { type: 'button', class: 'danger-text', onclick: () => showRemove(version, () => { location.hash = '#/'; }) }, 'Remove…'),
  ];
  const parent = version.parent && version.parent.removed === null && version.parent;
  return h('div', { class: 'head' },
    h('div', { class: 'title' },
      h('h1', null, h('a', { class: 'name', href: listAddress({ filter: `name:${version.name}` }), title: `All versions of ${version.name}`, text: version.name }), h('span', { class: 'at', text: '@' }), h('span', { class: 'number', text: version.version })),
      h('div', { class: 'tags' }, tags(version, session.unlocked && ((tag) => removeTag(version, tag, again))))),
    h('div', { class: 'actions' },
      parent && h('a', { class: 'button', href: compareAddress(parent.ref, version.ref), 'data-key': 'c', title: `Compare with ${parent.ref} (c)` }, 'Compare with parent'),
      changes));
}

function facts(version) {
  const pair = (label, ...content) => h('div', { class: 'fact' }, h('dt', { text: label }), h('dd', null, content));
  const children = version.children.slice(0, 3);
  const more = version.children.length - children.length + version.more_children;
  return h('dl', { class: 'facts' },
    pair('Saved', when(version.created)),
    pair('Size', bytes(version.bytes)),
    pair('dtype', version.dtypes.length ? version.dtypes.slice(0, 3).map(([dtype, size], n) => h('span', { title: bytes(size), text: `${n ? ', ' : ''}${dtype}` })) : '–', version.dtypes.length > 3 && ' …'),
    pair('Parent', version.parent ? [reference(version.parent), version.parent.removed !== null && h('span', { class: 'badge gone', text: 'removed' })] : 'none'),
    children.length > 0 && pair('Children', children.map((child, n) => [n ? ', ' : '', reference(child)]), more > 0 && ` and ${count(more)} more`),
    version.metrics.map(([key, value]) => h('div', { class: 'fact metric' }, h('dt', { text: key, title: key }), h('dd', { text: number(value, 6) }))),
    version.more_metrics > 0 && pair('More metrics', count(version.more_metrics)));
}
