/**
 * Exact pixels of a PNG file. A canvas would not do: it keeps colours multiplied by alpha, in 8 bits,
 * so what it gives back is not what the file holds wherever alpha is low.
 *
 * Source: the PNG specification, third edition, sections 5, 9 and 11.2.
 */

const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];
const RGBA = 6;
const BYTES_PER_PIXEL = 4;

/**
 * The picture in `buffer` (ArrayBuffer), as ImageData with colours not multiplied by alpha.
 * Throws an Error unless it is a whole PNG of 8-bit RGBA, not interlaced, as the decode node writes it.
 */
export async function decodePng(buffer) {
  const bytes = new Uint8Array(buffer);
  if (SIGNATURE.some((byte, index) => bytes[index] !== byte)) throw new Error("this is no PNG file");
  const { width, height, compressed } = readChunks(bytes);
  const rows = new Uint8Array(await new Response(inflated(compressed)).arrayBuffer());
  if (rows.length !== height * (1 + width * BYTES_PER_PIXEL)) throw new Error("this PNG file is cut short");
  return new ImageData(unfilter(rows, width * BYTES_PER_PIXEL, height), width, height);
}

function readChunks(bytes) {
  const view = new DataView(bytes.buffer);
  let width, height;
  const compressed = [];
  for (let at = SIGNATURE.length; at + 8 <= bytes.length; ) {
    const length = view.getUint32(at);
    const type = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    const start = at + 8;
    if (type === "IHDR") {
      [width, height] = [view.getUint32(start), view.getUint32(start + 4)];
      const [depth, colours, , , interlaced] = bytes.subarray(start + 8, start + 13);
      if (depth !== 8 || colours !== RGBA || interlaced) throw new Error("this PNG file is not plain 8-bit RGBA");
    } else if (type === "IDAT") {
      compressed.push(bytes.subarray(start, start + length));
    }
    at = start + length + 4; // past the checksum
  }
  return { width, height, compressed };
}

function inflated(parts) {
  return new Blob(parts).stream().pipeThrough(new DecompressionStream("deflate"));
}

/** Each row begins with the number of the filter that predicted its bytes from those left of and above them. */
function unfilter(rows, stride, height) {
  const pixels = new Uint8ClampedArray(stride * height);
  for (let y = 0; y < height; y++) {
    const source = y * (stride + 1);
    const predict = PREDICTORS[rows[source]];
    if (!predict) throw new Error(`this PNG file has a row with filter ${rows[source]}: 0 to 4 are known`);
    const target = y * stride;
    for (let x = 0; x < stride; x++) {
      const left = x < BYTES_PER_PIXEL ? 0 : pixels[target + x - BYTES_PER_PIXEL];
      const above = y ? pixels[target + x - stride] : 0;
      const corner = y && x >= BYTES_PER_PIXEL ? pixels[target + x - stride - BYTES_PER_PIXEL] : 0;
      pixels[target + x] = (rows[source + 1 + x] + predict(left, above, corner)) & 255;
    }
  }
  return pixels;
}

const PREDICTORS = [
  () => 0,
  (left) => left,
  (left, above) => above,
  (left, above) => (left + above) >> 1,
  paeth,
];

/** Whichever of the three is nearest to left + above - corner; the first of them at a draw. */
function paeth(left, above, corner) {
  const [byLeft, byAbove, byCorner] = [above - corner, left - corner, left + above - 2 * corner].map(Math.abs);
  if (byLeft <= byAbove && byLeft <= byCorner) return left;
  return byAbove <= byCorner ? above : corner;
}
