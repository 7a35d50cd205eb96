// What the server said of itself, and what is chosen for comparison.

export const session = {
  place: '',
  writable: false,
  unlocked: false,
  changed: () => {},
  take(found) {
    this.place = found.place;
    this.writable = found.writable;
    this.unlocked = found.unlocked;
    this.changed();
  },
};

// References of at most two versions, the one that was chosen first at the beginning.
export const chosen = {
  refs: [],
  has: (ref) => chosen.refs.includes(ref),
  toggle(ref) {
    if (this.has(ref)) this.refs = this.refs.filter((one) => one !== ref);
    else this.refs = [...this.refs, ref].slice(-2);
  },
};
