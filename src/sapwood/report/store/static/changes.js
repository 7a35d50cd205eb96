// Dialogs: unlocking, tags, removal, help.

import { get, post, token } from './api.js';
import { h, notice } from './dom.js';
import { bytes } from './format.js';
import { session } from './session.js';

function dialog(title, ...content) {
  const before = document.activeElement;
  const box = h('dialog', { 'aria-label': title },
    h('form', { method: 'dialog' }, h('h2', { text: title }), content));
  box.addEventListener('close', () => {
    box.remove();
    before?.focus?.();
  });
  document.body.append(box);
  box.showModal();
  return box;
}

function actions(label, kind = 'main') {
  const go = h('button', { type: 'submit', class: kind, value: 'go' }, label);
  return { go, row: h('div', { class: 'actions' },
    // No submit button: Enter presses the first one of those.
    h('button', { type: 'button', onclick: (event) => event.target.closest('dialog').close() }, 'Cancel'), go) };
}

// Keeps the dialog open, with what went wrong, until the work has succeeded.
function onGo(box, work) {
  const problem = h('p', { class: 'problem', role: 'alert' });
  const form = box.querySelector('form');
  form.querySelector('.actions').before(problem);
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const go = form.querySelector('[value=go]');
    if (go.disabled) return;
    go.disabled = true;
    try {
      await work();
      box.close();
    } catch (error) {
      problem.textContent = error.message;
    }
    go.disabled = false;
  });
}

export function showUnlock(then) {
  if (session.unlocked) {
    token.set('');
    session.take({ ...session, unlocked: false });
    then();
    return;
  }
  const input = h('input', { type: 'password', required: true, autocomplete: 'off', spellcheck: 'false' });
  const { row } = actions('Unlock');
  const box = dialog('Allow changes',
    h('p', { text: 'With the token the server was started with, you can tag and remove versions.' }),
    h('label', null, 'Token', input), row);
  input.focus();
  onGo(box, async () => {
    token.set(input.value.trim());
    const found = await get('session');
    if (!found.unlocked) {
      token.set('');
      throw new Error('This is not the token the server was started with.');
    }
    session.take(found);
    then();
  });
}

export function showTag(version, then) {
  const input = h('input', { type: 'text', required: true, maxlength: 100, autocomplete: 'off', spellcheck: 'false', pattern: '[A-Za-z0-9][A-Za-z0-9._+=\\-]*' });
  const { row } = actions('Tag');
  const box = dialog(`Tag ${version.ref}`,
    h('p', { text: 'A tag of this model that points to another version moves to this one.' }),
    h('label', null, 'Tag', input), row);
  input.focus();
  onGo(box, async () => {
    await post('tag', { ref: version.ref, id: version.id, tag: input.value });
    notice(`${input.value} is ${version.ref} now`);
    then();
  });
}

export async function removeTag(version, tag, then) {
  const { row } = actions('Remove tag');
  const box = dialog(`Remove the tag ${tag}?`, h('p', { text: `${version.ref} stays; only its tag goes.` }), row);
  onGo(box, async () => {
    await post('untag', { name: version.name, tag });
    notice(`${version.name} has no tag ${tag} any more`);
    then();
  });
}

export function showRemove(version, then) {
  const input = h('input', { type: 'text', required: true, autocomplete: 'off', spellcheck: 'false', placeholder: version.ref });
  const { go, row } = actions('Remove', 'danger');
  go.disabled = true;
  input.addEventListener('input', () => { go.disabled = input.value !== version.ref; });
  const box = dialog(`Remove ${version.ref}?`,
    h('p', null, 'This version (', h('strong', { text: bytes(version.bytes) }), ') cannot be loaded any more, and this cannot be undone. What other versions share with it stays; ', h('code', { text: 'sapwood store gc' }), ' gives back the rest.'),
    h('label', null, h('span', null, 'To confirm, enter ', h('code', { text: version.ref })), input), row);
  input.focus();
  onGo(box, async () => {
    await post('remove', { ref: version.ref, id: version.id, confirm: input.value });
    notice(`${version.ref} was removed`);
    then();
  });
}

const HELP = [
  ['/', 'filter'], ['j  k', 'next, previous row'], ['Enter', 'open'], ['x', 'choose for comparison'],
  ['c', 'compare'], ['[  ]', 'previous, next page'], ['h', 'all models'], ['Esc', 'leave a field, close'], ['?', 'this help'],
];

export function showHelp() {
  dialog('Keyboard',
    h('dl', { class: 'keys' }, HELP.map(([keys, what]) => [
      h('dt', null, keys.split('  ').map((key) => h('kbd', { text: key }))), h('dd', { text: what })])),
    h('p', { class: 'muted' }, 'Filters: ', h('code', { text: 'part-of-a-name' }), ' ', h('code', { text: 'name:nt3/run7' }), ' ', h('code', { text: 'tag:best' }), ' ', h('code', { text: 'val_acc>0.9' })),
    h('div', { class: 'actions' }, h('button', { type: 'submit', class: 'main' }, 'Close')));
}
