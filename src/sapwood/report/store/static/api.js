// Talking to the server.

const KEPT = 'sapwood-token';

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEPT) ?? '',
  set: (text) => (text ? sessionStorage.setItem(KEPT, text) : sessionStorage.removeItem(KEPT)),
};

function headers(more = {}) {
  return token.get() ? { ...more, authorization: `Bearer ${token.get()}` } : more;
}

async function checked(call) {
  let response;
  try {
    response = await call();
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Refused(0, 'The server does not answer. Is `sapwood store ui` still running?');
  }
  if (response.ok) return response;
  let text = `The server answered with status ${response.status}.`;
  try {
    text = (await response.json()).error ?? text;
  } catch { /* not its own words: a proxy, or too many requests */ }
  throw new Refused(response.status, text);
}

export function query(values) {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(values ?? {})) {
    if (value !== undefined && value !== null && value !== '') found.set(key, value);
  }
  return found.toString();
}

export async function get(what, values, signal) {
  const address = `/api/${what}?${query(values)}`;
  const response = await checked(() => fetch(address, { headers: headers(), signal }));
  return response.json();
}

export async function post(what, body) {
  const response = await checked(() => fetch(`/api/${what}`, {
    method: 'POST',
    headers: headers({ 'content-type': 'application/json' }),
    body: JSON.stringify(body),
  }));
  return response.json();
}

// One object for each line, as they come. Leaving the loop, or the signal, ends the server's work.
export async function* lines(what, values, signal) {
  const address = `/api/${what}?${query(values)}`;
  const response = await checked(() => fetch(address, { headers: headers(), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += value ?? '';
      const whole = rest.split('\n');
      rest = done ? '' : whole.pop();
      for (const line of whole) if (line) yield JSON.parse(line);
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
