/** Which part of a picture is seen, and how large: all of it, until one zooms in. Lengths are CSS pixels. */

const LARGEST_PIXEL = 64;

export class View {
  constructor() {
    this.reset();
  }

  /** See all of the picture. */
  reset() {
    this.zoom = 1; // times the scale at which all of it is seen
    this.centre = [0.5, 0.5]; // of the stage, in shares of the picture
  }

  /** Corner and scale of a picture on a stage, as `draw` takes them. */
  place(picture, stage) {
    const scale = this.zoom * fit(picture, stage);
    const [x, y] = ["width", "height"].map((side, axis) => stage[side] / 2 - this.centre[axis] * picture[side] * scale);
    return { x, y, scale };
  }

  /** Zoom by `factor`, leaving what is at `point` where it is. */
  zoomBy(factor, picture, stage, point = [stage.width / 2, stage.height / 2]) {
    const share = this.shareAt(point, picture, stage);
    const largest = LARGEST_PIXEL / fit(picture, stage);
    this.zoom = Math.min(Math.max(this.zoom * factor, 1), Math.max(largest, 1));
    const moved = this.shareAt(point, picture, stage);
    this.look(this.centre.map((at, axis) => at + share[axis] - moved[axis]));
  }

  /** Move the picture by so many CSS pixels. */
  drag(dx, dy, picture, stage) {
    const scale = this.zoom * fit(picture, stage);
    this.look([this.centre[0] - dx / (picture.width * scale), this.centre[1] - dy / (picture.height * scale)]);
  }

  /** Have a pixel in sight: at the centre, if it can be. */
  show(x, y, picture) {
    if (this.zoom > 1) this.look([(x + 0.5) / picture.width, (y + 0.5) / picture.height]);
  }

  /** The pixel at a point of the stage, as whole numbers that may lie outside the picture. */
  pixelAt(point, picture, stage) {
    const [x, y] = this.shareAt(point, picture, stage);
    return [Math.floor(x * picture.width), Math.floor(y * picture.height)];
  }

  shareAt([left, top], picture, stage) {
    const { x, y, scale } = this.place(picture, stage);
    return [(left - x) / (picture.width * scale), (top - y) / (picture.height * scale)];
  }

  look(centre) {
    this.centre = this.zoom > 1 ? centre.map((at) => Math.min(Math.max(at, 0), 1)) : [0.5, 0.5];
  }
}

function fit(picture, stage) {
  return Math.min(stage.width / picture.width, stage.height / picture.height);
}
