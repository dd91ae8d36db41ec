/** Draws a picture with alpha, in one of several ways to look at it. */

const SQUARE = 8; // of the checkerboard, in CSS pixels
const SHARP_FROM = 2; // CSS pixels per pixel from which on pixels are shown as squares

/** Ways to look at a picture, with the names of their buttons. */
export const MODES = {
  checkerboard: "Checkerboard",
  white: "White",
  black: "Black",
  alpha: "Alpha",
  compare: "Compare",
};

/** A decoded picture: its exact pixels, and surfaces to draw it from. */
export class Picture {
  /** `pixels` is ImageData with colours not multiplied by alpha. */
  constructor(pixels) {
    this.pixels = pixels;
    this.width = pixels.width;
    this.height = pixels.height;
    this.colours = surface(pixels);
    this.alpha = surface(alphaAsGrey(pixels));
  }

  /** Red, green, blue and alpha of a pixel, 0 to 255; undefined outside. */
  at(x, y) {
    if (x < 0 || y < 0 || x >= this.width || y >= this.height) return undefined;
    const start = 4 * (y * this.width + x);
    return this.pixels.data.subarray(start, start + 4);
  }
}

/**
 * Draw `picture` in `mode`, its corner at `view.x`, `view.y`, a pixel `view.scale` wide, in CSS pixels. Of "compare"
 * the left `split` (0 to 1) shows `background` alone, the rest the picture on it: a CSS colour or an image.
 */
export function draw(context, picture, view, mode, { split, background }) {
  const frame = [view.x, view.y, picture.width * view.scale, picture.height * view.scale];
  context.imageSmoothingEnabled = view.scale < SHARP_FROM;
  if (mode === "alpha") {
    context.drawImage(picture.alpha, ...frame);
    return;
  }
  context.save();
  context.beginPath();
  context.rect(...frame);
  context.clip();
  if (mode === "compare" && background instanceof HTMLImageElement) {
    context.drawImage(background, ...covering(background, frame));
  } else {
    context.fillStyle = { checkerboard: checkerboard(context), compare: background }[mode] ?? mode;
    context.fillRect(...frame);
  }
  if (mode === "compare") clipRightOf(context, frame, split);
  context.drawImage(picture.colours, ...frame);
  context.restore();
  if (mode === "compare") drawDivider(context, frame, split);
}

function surface(pixels) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [pixels.width, pixels.height];
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

function alphaAsGrey({ data, width, height }) {
  const grey = new ImageData(width, height);
  for (let at = 0; at < data.length; at += 4) {
    grey.data.fill(data[at + 3], at, at + 3);
    grey.data[at + 3] = 255;
  }
  return grey;
}

function checkerboard(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 2 * SQUARE;
  const paint = tile.getContext("2d");
  paint.fillStyle = "#fff";
  paint.fillRect(0, 0, 2 * SQUARE, 2 * SQUARE);
  paint.fillStyle = "#ccc";
  paint.fillRect(0, 0, SQUARE, SQUARE);
  paint.fillRect(SQUARE, SQUARE, SQUARE, SQUARE);
  return context.createPattern(tile, "repeat");
}

/** Where an image goes so that it fills the frame, cut evenly at two sides. */
function covering(image, [x, y, width, height]) {
  const scale = Math.max(width / image.naturalWidth, height / image.naturalHeight);
  const size = [image.naturalWidth * scale, image.naturalHeight * scale];
  return [x + (width - size[0]) / 2, y + (height - size[1]) / 2, ...size];
}

function clipRightOf(context, [x, y, width, height], split) {
  context.beginPath();
  context.rect(x + split * width, y, (1 - split) * width, height);
  context.clip();
}

function drawDivider(context, [x, y, width, height], split) {
  for (const [colour, offset] of [["#000", 0], ["#fff", 1]]) {
    context.fillStyle = colour;
    context.fillRect(x + split * width - 1 + offset, y, 1, height);
  }
}
