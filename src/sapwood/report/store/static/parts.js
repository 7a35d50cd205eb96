// Pieces that several views have.

import { h } from './dom.js';
import { ago, moment, percent } from './format.js';
import { versionAddress } from './routes.js';

export function reference(version, attributes = {}) {
  const name = version.version === undefined
    ? [h('span', { class: 'name', text: version.ref })]
    : [h('span', { class: 'name', text: version.name }), h('span', { class: 'at', text: '@' }),
      h('span', { class: 'number', text: version.version })];
  if (version.removed !== null && version.removed !== undefined) {
    return h('span', { class: 'ref gone', title: `${version.ref} was removed` }, name);
  }
  return h('a', { class: 'ref', href: versionAddress(version.ref), title: version.ref, ...attributes }, name);
}

export function tags(version, remove) {
  const all = (version.tags ?? []).map((tag) => h('span', { class: 'tag', title: tag },
    h('span', { class: 'label', text: tag }),
    remove && h('button', { type: 'button', 'aria-label': `Remove tag ${tag}`, title: 'Remove this tag', onclick: () => remove(tag) }, '×')));
  if (version.more_tags) all.push(h('span', { class: 'tag more', text: `+${version.more_tags}` }));
  return all;
}

export function when(seconds) {
  return h('time', { datetime: new Date(seconds * 1000).toISOString(), title: moment(seconds), text: ago(seconds) });
}

export function share(value, sharing) {
  if (!sharing.supported) return h('span', { class: 'muted', title: 'this repository cannot say which tensors versions share', text: 'n/a' });
  if (value === null || value === undefined) return h('span', { class: 'muted', title: 'being counted', text: '…' });
  return h('span', { class: 'meter', vars: { '--part': value }, title: `${(value * 100).toFixed(2)} % of its bytes are those of other versions, too` },
    h('span', { text: percent(value) }));
}

export function sharingNote(sharing) {
  if (!sharing.supported) return 'This repository cannot say which tensors versions share.';
  if (!sharing.complete) return `Counting what versions share: ${sharing.versions} of ${sharing.total} read …`;
  if (sharing.open) return `${sharing.open} tensors were not compared with others yet.`;
  return '';
}

export function pager(found, size, go) {
  const last = Math.min(found.total, found.offset + size);
  const text = found.total ? `${(found.offset + 1).toLocaleString('en')}–${last.toLocaleString('en')} of ${found.total.toLocaleString('en')}` : 'none';
  const back = found.offset > 0;
  const on = last < found.total;
  return h('nav', { class: 'pager', 'aria-label': 'Pages' },
    h('button', { type: 'button', 'data-key': '[', disabled: !back, title: 'Previous page ([)', 'aria-label': 'Previous page', onclick: () => go(Math.max(0, found.offset - size)) }, '‹'),
    h('span', { class: 'range', text }),
    h('button', { type: 'button', 'data-key': ']', disabled: !on, title: 'Next page (])', 'aria-label': 'Next page', onclick: () => go(found.offset + size) }, '›'));
}
