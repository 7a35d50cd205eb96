// Making elements. Text is always text: nothing here, or anywhere else, reads HTML from a string.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (key === 'text') element.textContent = value;
    else if (key === 'vars') for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
    else if (key === 'value') element.value = value;
    else element.setAttribute(key, value === true ? '' : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false) element.append(child);
  }
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

export function later(wait, call) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), wait);
  };
}

export function notice(text, kind = 'plain') {
  const close = () => box.remove();
  const box = h('div', { class: `notice ${kind}` }, h('span', { text }),
    h('button', { type: 'button', class: 'quiet', 'aria-label': 'Close', onclick: close }, '×'));
  document.getElementById('notices').append(box);
  setTimeout(close, kind === 'bad' ? 12000 : 5000);
}

export function failure(error, again) {
  return h('div', { class: 'failure', role: 'alert' },
    h('p', { text: error.message }),
    again && h('button', { type: 'button', onclick: again }, 'Try again'));
}
