// QR codes (ISO/IEC 18004) of a link: byte mode, error correction level L, the smallest version that holds the text.

const CHECKS = [ // error correction codewords of a block, by version
  7, 10, 15, 20, 26, 18, 20, 24, 30, 18, 20, 24, 26, 30, 22, 24, 28, 30, 28, 28, 28, 28, 30, 30, 26, 28, 30, 30, 30, 30,
  30, 30, 30, 30, 30, 30, 30, 30, 30, 30,
];
const BLOCKS = [ // blocks, by version
  1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8, 8, 9, 9, 10, 12, 12, 12, 13, 14, 15, 16, 17, 18, 19, 19,
  20, 21, 22, 24, 25,
];
const QUIET = 4;
const MASKS = [
  (x, y) => (x + y) % 2, (x, y) => y % 2, (x) => x % 3, (x, y) => (x + y) % 3,
  (x, y) => (Math.floor(x / 3) + Math.floor(y / 2)) % 2, (x, y) => ((x * y) % 2) + ((x * y) % 3),
  (x, y) => (((x * y) % 2) + ((x * y) % 3)) % 2, (x, y) => (((x + y) % 2) + ((x * y) % 3)) % 2,
];

/** The dark modules of a text, as rows of 0 and 1; null: the text is too long for any code. */
export function qrRows(text) {
  const bytes = new TextEncoder().encode(text);
  const version = CHECKS.findIndex((_, index) => bytes.length <= room(index + 1)) + 1;
  if (!version) return null;
  const bits = bitsOf(interleaved(dataOf(bytes, version), version));
  const codes = MASKS.map((_, mask) => drawn(version, bits, mask));
  const penalties = codes.map(penalty);
  return codes[penalties.indexOf(Math.min(...penalties))];
}

/** The code as an SVG element that is dark on light in every theme; null: the text is too long. */
export function qrImage(text, label) {
  const rows = qrRows(text);
  if (!rows) return null;
  const size = rows.length + 2 * QUIET;
  const shape = (name, fields) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
    return made;
  };
  const svg = shape("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": label, "shape-rendering": "crispEdges" });
  let path = "";
  rows.forEach((row, y) => row.forEach((dark, x) => { if (dark) path += `M${x + QUIET} ${y + QUIET}h1v1h-1z`; }));
  svg.append(shape("rect", { width: size, height: size, fill: "#fff" }), shape("path", { d: path, fill: "#000" }));
  return svg;
}

// --- codewords -------------------------------------------------------------------------------------------------------

function places(version) { // of alignment patterns, on both axes
  if (version === 1) return [];
  const count = Math.floor(version / 7) + 2;
  const step = version === 32 ? 26 : Math.ceil((version * 4 + 4) / (count * 2 - 2)) * 2;
  return [6, ...Array.from({ length: count - 1 }, (_, index) => version * 4 + 10 - (count - 2 - index) * step)];
}

function codewords(version) {
  const patterns = places(version).length;
  let modules = (16 * version + 128) * version + 64;
  if (patterns) modules -= (25 * patterns - 10) * patterns - 55;
  if (version >= 7) modules -= 36;
  return Math.floor(modules / 8);
}

const dataSize = (version) => codewords(version) - CHECKS[version - 1] * BLOCKS[version - 1];
const room = (version) => dataSize(version) - (version < 10 ? 2 : 3); // mode and length come first

function dataOf(bytes, version) {
  const digits = version < 10 ? 2 : 4; // of the length, in hexadecimal
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const whole = `4${bytes.length.toString(16).padStart(digits, "0")}${hex}0`; // mode, length, text, end
  const made = whole.match(/../g).map((pair) => parseInt(pair, 16));
  for (let pad = 0; made.length < dataSize(version); pad += 1) made.push(pad % 2 ? 0x11 : 0xec);
  return made;
}

function times(a, b) { // in the field of 256 elements
  let product = 0;
  for (let bit = 7; bit >= 0; bit -= 1) product = (product << 1) ^ ((product >> 7) * 0x11d) ^ (((b >> bit) & 1) * a);
  return product;
}

function checksOf(data, count) { // Reed-Solomon
  let divisor = [1];
  for (let index = 0, root = 1; index < count; index += 1, root = times(root, 2)) {
    divisor = [...divisor, 0].map((each, at) => each ^ times(divisor[at - 1] ?? 0, root));
  }
  const rest = [...data, ...Array(count).fill(0)];
  data.forEach((_, at) => {
    const lead = rest[at];
    if (lead) divisor.forEach((each, offset) => { rest[at + offset] ^= times(each, lead); });
  });
  return rest.slice(data.length);
}

function interleaved(data, version) {
  const count = BLOCKS[version - 1];
  const short = Math.floor(data.length / count);
  const long = data.length % count; // so many blocks, the last ones, have one byte more
  const blocks = [];
  for (let block = 0, at = 0; block < count; block += 1) {
    const size = short + (block >= count - long ? 1 : 0);
    blocks.push(data.slice(at, at + size));
    at += size;
  }
  const checks = blocks.map((block) => checksOf(block, CHECKS[version - 1]));
  const across = (lists) => lists.at(-1).flatMap((_, at) => lists.filter((list) => at < list.length).map((list) => list[at]));
  return [...across(blocks), ...across(checks)];
}

const bitsOf = (bytes) => bytes.flatMap((byte) => [7, 6, 5, 4, 3, 2, 1, 0].map((bit) => (byte >> bit) & 1));

function remainder(value, generator, bits) {
  let rest = value;
  for (let step = 0; step < bits; step += 1) rest = (rest << 1) ^ ((rest >> (bits - 1)) * generator);
  return (value << bits) | rest;
}

// --- modules ---------------------------------------------------------------------------------------------------------

function drawn(version, bits, mask) {
  const size = version * 4 + 17;
  const rows = Array.from({ length: size }, () => Array(size).fill(null)); // null: of the text
  const set = (x, y, dark) => { if (x >= 0 && y >= 0 && x < size && y < size) rows[y][x] = Number(dark); };
  const square = (x, y, radius, isDark) => {
    for (let dy = -radius; dy <= radius; dy += 1) {
      for (let dx = -radius; dx <= radius; dx += 1) set(x + dx, y + dy, isDark(Math.max(Math.abs(dx), Math.abs(dy))));
    }
  };
  for (let at = 0; at < size; at += 1) {
    set(6, at, at % 2 === 0);
    set(at, 6, at % 2 === 0);
  }
  for (const [x, y] of [[3, 3], [size - 4, 3], [3, size - 4]]) square(x, y, 4, (ring) => ring !== 2 && ring !== 4);
  const axis = places(version);
  for (const x of axis) {
    for (const y of axis) {
      if (!((x === 6 && y === 6) || (x === 6 && y === size - 7) || (x === size - 7 && y === 6))) square(x, y, 2, (ring) => ring !== 1);
    }
  }
  drawFormat(size, set, mask);
  if (version >= 7) drawVersion(size, set, version);
  fill(rows, bits, mask);
  return rows;
}

function drawFormat(size, set, mask) {
  const format = remainder((1 << 3) | mask, 0x537, 10) ^ 0x5412; // 1: level L
  const bit = (index) => (format >> index) & 1;
  for (let index = 0; index < 15; index += 1) {
    const [x, y] = index < 8 ? [8, index < 6 ? index : index + 1] : [index === 8 ? 7 : 14 - index, 8];
    set(x, y, bit(index));
    if (index < 8) set(size - 1 - index, 8, bit(index));
    else set(8, size - 15 + index, bit(index));
  }
  set(8, size - 8, 1);
}

function drawVersion(size, set, version) {
  const told = remainder(version, 0x1f25, 12);
  for (let index = 0; index < 18; index += 1) {
    const a = size - 11 + (index % 3);
    const b = Math.floor(index / 3);
    set(a, b, (told >> index) & 1);
    set(b, a, (told >> index) & 1);
  }
}

function fill(rows, bits, mask) { // two columns at a time from the right, up and down in turn
  const size = rows.length;
  let next = 0;
  for (let right = size - 1; right >= 1; right -= 2) {
    if (right === 6) right = 5; // the column of the timing pattern
    for (let step = 0; step < size; step += 1) {
      const y = ((right + 1) & 2) === 0 ? size - 1 - step : step;
      for (const x of [right, right - 1]) {
        if (rows[y][x] !== null) continue;
        rows[y][x] = (bits[next] ?? 0) ^ Number(MASKS[mask](x, y) === 0);
        next += 1;
      }
    }
  }
}

function penalty(rows) { // long runs, blocks of one colour, and an uneven share of dark modules are hard to read
  const size = rows.length;
  let sum = 0;
  let dark = 0;
  for (let y = 0; y < size; y += 1) {
    for (const line of [rows[y], rows.map((row) => row[y])]) {
      for (const run of line.join("").match(/0{5,}|1{5,}/g) ?? []) sum += run.length - 2;
      sum += 40 * (line.join("").match(/(?=10111010000)|(?=00001011101)/g) ?? []).length;
    }
    for (let x = 0; x < size; x += 1) {
      dark += rows[y][x];
      if (x && y && rows[y][x] === rows[y - 1][x] && rows[y][x] === rows[y][x - 1] && rows[y][x] === rows[y - 1][x - 1]) sum += 3;
    }
  }
  return sum + 10 * Math.floor(Math.abs((dark * 20) / (size * size) - 10));
}
