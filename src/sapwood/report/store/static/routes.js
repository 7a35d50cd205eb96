// Addresses inside the page: all behind the #, so that the server sees none of them.

import { query } from './api.js';

export function listAddress(values) {
  const text = query(values);
  return text ? `#/?${text}` : '#/';
}

export function versionAddress(ref, values) {
  const text = query(values);
  return `#/v/${encodeURIComponent(ref)}${text ? `?${text}` : ''}`;
}

export function compareAddress(before, after) {
  return `#/compare/${encodeURIComponent(before)}/${encodeURIComponent(after)}`;
}

export function current() {
  const [path, text] = location.hash.replace(/^#\/?/, '').split('?');
  const parts = path.split('/').map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts, values: Object.fromEntries(new URLSearchParams(text ?? '')) };
}

// Changes what is after the ? without a step in the history.
export function amend(address) {
  history.replaceState(null, '', address);
}
