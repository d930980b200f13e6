import { LIMITS } from "./limits.js";

/** Items that a stream has accepted and its reader has not taken, and the positions that a reset may go back to. */
export class ItemQueue {
  constructor(start, itemsMax, charsMax) {
    this._items = [];
    this._chars = 0;
    this._itemsMax = itemsMax;
    this._charsMax = charsMax;
    this._read = [start]; // positions that the reader has had
  }

  get length() {
    return this._items.length;
  }

  get isFull() {
    return this._items.length >= this._itemsMax || this._chars >= this._charsMax;
  }

  /** Whether there is room enough for a paused stream to go on. */
  get isDrained() {
    return this._items.length <= this._itemsMax / 4 && this._chars <= this._charsMax / 4;
  }

  push(item, chars, at) {
    this._items.push({ item, chars, at });
    this._chars += chars;
  }

  /** The oldest item, which the reader has from now on. */
  shift() {
    const { item, chars, at } = this._items.shift();
    this._chars -= chars;
    if (at.s > this._read.at(-1).s) {
      this._read.push(at);
      if (this._read.length > LIMITS.boundaries) this._read.splice(1, 1); // the start stays
    }
    return item;
  }

  clear() {
    this._items.length = 0;
    this._chars = 0;
  }

  /** Removes what is above `to`. Returns the last position that stays, and whether the reader has had a later one. */
  rewind(to) {
    while (this._items.length > 0 && this._items.at(-1).at.s > to.s) this._chars -= this._items.pop().chars;
    // The reader must be told of void items it has read; an item that joined several frames is void as a whole.
    const kept = this._items.at(-1)?.at ?? this._read.findLast(({ s }) => s <= to.s) ?? to;
    const tail = kept.s === to.s ? to : kept; // frames up to `to` are in the log under the epoch that made them
    const wasRead = this._read.at(-1).s > to.s;
    if (wasRead) this._read = [...this._read.filter(({ s }) => s < kept.s), tail];
    return { tail, wasRead };
  }
}
