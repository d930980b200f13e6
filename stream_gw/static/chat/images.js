// Images that go with a prompt. They are made small in the browser, sent as data URLs, and kept in IndexedDB:
// localStorage would hold only a few.

import { randomId } from "../client.js";

export const IMAGES_MAX = 4; // of one message
const FILE_BYTES_MAX = 25 << 20; // larger files are not opened
const KEPT_BYTES_MAX = 512 << 10; // a file up to this size and SIDE_PX_MAX is sent as it is
const SIDE_PX_MAX = 1568; // larger images are scaled down: models see no more
const URL_CHARS_MAX = 2 << 20; // of one image, after scaling
const REQUEST_CHARS_MAX = 6 << 20; // of all images in a request; the gateway takes a body of 8 MiB
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
export const ACCEPT = TYPES.join(",");
const JPEG_QUALITY = 0.85;

export class Images {
  constructor() {
    this.memory = new Map(); // of browsers without IndexedDB, as some private windows are
    this.database = new Promise((resolve) => {
      try {
        const request = indexedDB.open("sgw.images", 1);
        request.onupgradeneeded = () => request.result.createObjectStore("images");
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => resolve(null);
      } catch {
        resolve(null);
      }
    });
  }

  /** Reads a file, scales it down and keeps it. Returns `{id, name, url}`. Throws an Error that says what is wrong. */
  async add(file) {
    const url = await dataUrl(file);
    const image = { id: randomId(), name: file.name || "image" };
    this.memory.set(image.id, url);
    await this.transact("readwrite", (images) => images.put(url, image.id)).then(
      (kept) => kept !== null && this.memory.delete(image.id),
      () => {}, // the disk is full: only this tab has it
    );
    return { ...image, url };
  }

  async url(id) {
    return this.memory.get(id) ?? (await this.transact("readonly", (images) => images.get(id))) ?? null;
  }

  remove(ids) {
    for (const id of ids) {
      this.memory.delete(id);
      this.transact("readwrite", (images) => images.delete(id)).catch(() => {}); // it stays until the site's data is cleared
    }
  }

  /** The content of a message with images, in the shape of OpenAI's API; `left` counts down to the request's limit. */
  async content({ text, images }, left) {
    const parts = [];
    for (const { id, name } of images) {
      const url = await this.url(id);
      const fits = url !== null && url.length <= left.chars;
      if (fits) left.chars -= url.length;
      parts.push(fits ? { type: "image_url", image_url: { url } } : { type: "text", text: `[The image ${name} is left out.]` });
    }
    return [...parts, ...(text ? [{ type: "text", text }] : [])];
  }

  async transact(mode, work) {
    const database = await this.database;
    if (!database) return null;
    return new Promise((resolve, reject) => {
      const request = work(database.transaction("images", mode).objectStore("images"));
      request.onsuccess = () => resolve(request.result ?? null);
      request.onerror = () => reject(request.error);
    });
  }
}

export const imageBudget = () => ({ chars: REQUEST_CHARS_MAX });

async function dataUrl(file) {
  if (!TYPES.includes(file.type)) throw new Error(`${file.name}: only PNG, JPEG, WebP and GIF images can be attached.`);
  if (file.size > FILE_BYTES_MAX) throw new Error(`${file.name} is larger than ${FILE_BYTES_MAX >> 20} MiB.`);
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} cannot be read as an image.`);
  });
  const scale = Math.min(1, SIDE_PX_MAX / Math.max(bitmap.width, bitmap.height));
  const blob = scale === 1 && file.size <= KEPT_BYTES_MAX ? file : await scaled(bitmap, scale);
  bitmap.close();
  const url = await urlOf(blob);
  if (url.length > URL_CHARS_MAX) throw new Error(`${file.name} is too large, also after scaling it down.`);
  return url;
}

function scaled(bitmap, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", JPEG_QUALITY));
}

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The image cannot be read."));
    reader.readAsDataURL(blob);
  });
}
