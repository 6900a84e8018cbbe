// The plane that the layout lies in: what is seen of it, what is near a place, what is inside a line.

export type Spot = [x: number, y: number];
export type Polygon = Spot[];

/** The center of what is seen, and pixels to a unit of the layout. */
export interface Sight {
  x: number;
  y: number;
  scale: number;
}

export interface Size {
  width: number;
  height: number;
}

const MARGIN = 0.94;
const MOST_CORNERS = 80;
const DIGITS = 4;

/** All of [−1, 1] × [−1, 1]. */
export const whole = ({ width, height }: Size): Sight => ({
  x: 0,
  y: 0,
  scale: (MARGIN * Math.min(width, height)) / 2,
});

export const toScreen = (sight: Sight, size: Size, [x, y]: Spot): Spot => [
  size.width / 2 + (x - sight.x) * sight.scale,
  size.height / 2 - (y - sight.y) * sight.scale,
];

export const toPlane = (sight: Sight, size: Size, [x, y]: Spot): Spot => [
  sight.x + (x - size.width / 2) / sight.scale,
  sight.y - (y - size.height / 2) / sight.scale,
];

/** The sight after a zoom by `factor` that leaves the place under the pointer where it is. */
export function zoomed(sight: Sight, size: Size, at: Spot, factor: number): Sight {
  const [x, y] = toPlane(sight, size, at);
  const least = whole(size).scale / 2;
  const scale = Math.min(1e6, Math.max(least, sight.scale * factor));
  const share = sight.scale / scale;
  return { x: x + (sight.x - x) * share, y: y + (sight.y - y) * share, scale };
}

/** Pixels: the fewer of `num` points are in sight, the larger each is. */
export function pointSize(num: number, scale: number, { width, height }: Size): number {
  const inSight = Math.max(1, num * Math.min(1, (width * height) / (2 * scale) ** 2));
  return Math.max(1.5, Math.min(9, 0.35 * Math.sqrt((width * height) / inSight)));
}

export function polygonIn(text: string | null): Polygon | null {
  const numbers = (text ?? "").split(",").map(Number);
  if (!text || numbers.length < 6 || numbers.length % 2 || !numbers.every(Number.isFinite)) return null;
  return Array.from({ length: numbers.length / 2 }, (_, at) => [numbers[2 * at]!, numbers[2 * at + 1]!]);
}

export const written = (polygon: Polygon) =>
  polygon.map((corner) => corner.map((value) => Number(value.toFixed(DIGITS))).join(",")).join(",");

/** The same line with so few corners that it can be an address. */
export function simplified(polygon: Polygon): Polygon {
  const step = Math.max(1, polygon.length / MOST_CORNERS);
  return Array.from({ length: Math.min(polygon.length, MOST_CORNERS) }, (_, at) => polygon[Math.floor(at * step)]!);
}

/** Marks the points inside a polygon, by the even-odd rule. */
export function inside(polygon: Polygon, points: Float32Array): Uint8Array {
  const marks = new Uint8Array(points.length / 2);
  const xs = polygon.map(([x]) => x);
  const ys = polygon.map(([, y]) => y);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  for (let at = 0; at < marks.length; at += 1) {
    const x = points[2 * at]!;
    const y = points[2 * at + 1]!;
    if (x < left || x > right || y < low || y > high) continue;
    let odd = false;
    for (let end = 0, start = xs.length - 1; end < xs.length; start = end, end += 1) {
      const above = ys[end]! > y;
      if (above !== ys[start]! > y) {
        const cut = ((xs[start]! - xs[end]!) * (y - ys[end]!)) / (ys[start]! - ys[end]!) + xs[end]!;
        if (x < cut) odd = !odd;
      }
    }
    marks[at] = odd ? 1 : 0;
  }
  return marks;
}

/** Points by the cell that they lie in. */
export class Cells {
  private readonly starts: Uint32Array;
  private readonly order: Uint32Array;
  private readonly side: number;

  constructor(private readonly points: Float32Array) {
    const num = points.length / 2;
    this.side = Math.max(1, Math.min(512, Math.ceil(Math.sqrt(num / 4))));
    this.starts = new Uint32Array(this.side ** 2 + 1);
    this.order = new Uint32Array(num);
    for (let at = 0; at < num; at += 1) this.starts[this.cell(at) + 1]! += 1;
    for (let at = 0; at < this.side ** 2; at += 1) this.starts[at + 1]! += this.starts[at]!;
    const next = this.starts.slice();
    for (let at = 0; at < num; at += 1) this.order[next[this.cell(at)]!++] = at;
  }

  /** The point nearest to a place, or -1 where none is within `reach`. */
  nearest([x, y]: Spot, reach: number): number {
    let best = -1;
    let least = reach ** 2;
    for (let row = this.line(y - reach); row <= this.line(y + reach); row += 1) {
      const begin = this.starts[row * this.side + this.line(x - reach)]!;
      const end = this.starts[row * this.side + this.line(x + reach) + 1]!;
      for (let at = begin; at < end; at += 1) {
        const point = this.order[at]!;
        const distance = (this.points[2 * point]! - x) ** 2 + (this.points[2 * point + 1]! - y) ** 2;
        if (distance < least) [best, least] = [point, distance];
      }
    }
    return best;
  }

  private cell(point: number): number {
    return this.line(this.points[2 * point + 1]!) * this.side + this.line(this.points[2 * point]!);
  }

  private line(value: number): number {
    return Math.min(this.side - 1, Math.max(0, Math.floor(((value + 1) / 2) * this.side)));
  }
}
