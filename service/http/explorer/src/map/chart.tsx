// The part of the map that hands move: pan, zoom, hover, lasso, by pointer, touch and keyboard.

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";

import type { Drawn } from "./overlay";
import { Points } from "./points";
import { simplified, toPlane, toScreen, whole, zoomed, type Cells, type Polygon, type Sight, type Size, type Spot } from "./plane";

const REACH = 9; // pixels
const STEP = 60; // pixels of an arrow key
const WHEEL = 0.0016;
const BUTTON = 1.5;
const CLICK = 4; // pixels that a hand may move in a click

export interface Chart {
  places: Float32Array;
  cells: Cells;
  slots: Uint16Array;
  palette: Uint8Array;
  polygon: Polygon | null;
  lassoing: boolean;
  sight: Sight | null;
  label: string;
  /** Points that are drawn as pictures: these are met before others. */
  targets(): Drawn | null;
  /** byHand: it was moved, and has not only come with the size of the window. */
  onSight(sight: Sight, size: Size, byHand: boolean): void;
  onLasso(polygon: Polygon): void;
  /** The point below the pointer, -1 for none, and where that is. */
  onHover(point: number, at: Spot): void;
  onPick(point: number): void;
  onFailure(error: Error): void;
}

export function Chart(given: Chart) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const outline = useRef<SVGPolygonElement>(null);
  const hands = useRef<Hands | null>(null);
  useLayoutEffect(() => {
    try {
      hands.current = new Hands(canvas.current!, outline.current!, given);
    } catch (error) {
      given.onFailure(error as Error);
      return;
    }
    return () => hands.current?.close();
  }, []);
  useLayoutEffect(() => void (hands.current && (hands.current.given = given)));
  useEffect(() => hands.current?.points.setPlaces(given.places), [given.places]);
  useEffect(() => hands.current?.points.setSlots(given.slots), [given.slots]);
  useEffect(() => hands.current?.points.setPalette(given.palette), [given.palette]);
  useEffect(() => hands.current?.outlined(given.polygon), [given.polygon]);
  return (
    <>
      <canvas
        ref={canvas}
        class={given.lassoing ? "chart lassoing" : "chart"}
        tabIndex={0}
        role="application"
        aria-roledescription="map"
        aria-label={given.label}
      />
      <svg class="outline" aria-hidden="true">
        <polygon ref={outline} />
      </svg>
      <div class="zoom">
        <button type="button" aria-label="Zoom in" onClick={() => hands.current?.zoomBy(BUTTON)}>
          +
        </button>
        <button type="button" aria-label="Zoom out" onClick={() => hands.current?.zoomBy(1 / BUTTON)}>
          −
        </button>
        <button type="button" aria-label="Show all" onClick={() => hands.current?.showAll()}>
          ⤢
        </button>
      </div>
    </>
  );
}

/** What is seen of the plane, by corners. */
export function seen(sight: Sight, size: Size): Polygon {
  const corners: Spot[] = [[0, 0], [size.width, 0], [size.width, size.height], [0, size.height]];
  return corners.map((corner) => toPlane(sight, size, corner));
}

class Hands {
  readonly points: Points;
  private sight: Sight;
  private readonly down = new Map<number, Spot>();
  private line: Polygon | null = null;
  private polygon: Polygon | null = null;
  private moved = 0;
  private readonly watcher: ResizeObserver;
  private readonly listening = new AbortController();

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly outline: SVGPolygonElement,
    public given: Chart,
  ) {
    this.points = new Points(canvas);
    this.sight = given.sight ?? whole(this.size);
    const listen = <K extends keyof HTMLElementEventMap>(name: K, listener: (event: HTMLElementEventMap[K]) => void) =>
      canvas.addEventListener(name, listener, { signal: this.listening.signal, passive: false });
    listen("pointerdown", (event) => this.press(event));
    listen("pointermove", (event) => this.drag(event));
    listen("pointerup", (event) => this.release(event));
    listen("pointercancel", (event) => this.down.delete(event.pointerId));
    listen("pointerleave", () => given.onHover(-1, [0, 0]));
    listen("wheel", (event) => this.turn(event));
    listen("keydown", (event) => this.type(event));
    this.watcher = new ResizeObserver(() => this.look(this.sight, false));
    this.watcher.observe(canvas);
  }

  close(): void {
    this.watcher.disconnect();
    this.listening.abort();
    this.points.close();
  }

  zoomBy(factor: number): void {
    const { width, height } = this.size;
    this.look(zoomed(this.sight, this.size, [width / 2, height / 2], factor));
  }

  showAll(): void {
    this.look(whole(this.size));
  }

  outlined(polygon: Polygon | null): void {
    this.polygon = polygon;
    const corners = polygon?.map((corner) => toScreen(this.sight, this.size, corner).join(","));
    this.outline.setAttribute("points", corners?.join(" ") ?? "");
  }

  private get size(): Size {
    return { width: this.canvas.clientWidth || 1, height: this.canvas.clientHeight || 1 };
  }

  private look(sight: Sight, byHand = true): void {
    this.sight = sight;
    this.points.moveTo(sight);
    this.outlined(this.polygon);
    this.given.onSight(sight, this.size, byHand);
  }

  private press(event: PointerEvent): void {
    this.canvas.setPointerCapture(event.pointerId);
    const at = spot(event);
    this.down.set(event.pointerId, at);
    this.moved = 0;
    if (this.down.size === 1 && (this.given.lassoing || event.shiftKey)) this.line = [toPlane(this.sight, this.size, at)];
    else this.line = null;
  }

  private drag(event: PointerEvent): void {
    const at = spot(event);
    const before = this.down.get(event.pointerId);
    if (!before) {
      this.given.onHover(this.pointAt(at), at);
      return;
    }
    const [x, y] = [at[0] - before[0], at[1] - before[1]];
    this.moved += Math.hypot(x, y);
    if (this.line) {
      this.line.push(toPlane(this.sight, this.size, at));
      this.outlined(this.line);
    } else if (this.down.size === 1) {
      const { scale } = this.sight;
      this.look({ x: this.sight.x - x / scale, y: this.sight.y + y / scale, scale });
    } else this.pinch(event.pointerId, before, at);
    this.down.set(event.pointerId, at);
  }

  private pinch(id: number, before: Spot, at: Spot): void {
    const other = [...this.down].find(([known]) => known !== id)![1];
    const factor = distance(at, other) / Math.max(1, distance(before, other));
    const center: Spot = [(at[0] + other[0]) / 2, (at[1] + other[1]) / 2];
    this.look(zoomed(this.sight, this.size, center, factor));
  }

  private release(event: PointerEvent): void {
    this.down.delete(event.pointerId);
    const { line } = this;
    this.line = null;
    if (line && line.length > 2 && this.moved > CLICK) this.given.onLasso(simplified(line));
    else if (this.moved <= CLICK) {
      const point = this.pointAt(spot(event));
      if (point >= 0) this.given.onPick(point);
    }
  }

  private pointAt(at: Spot): number {
    const { places, targets } = this.given;
    const drawn = targets();
    const away = (point: number) => {
      const [x, y] = toScreen(this.sight, this.size, [places[2 * point]!, places[2 * point + 1]!]);
      return Math.max(Math.abs(x - at[0]), Math.abs(y - at[1]));
    };
    // of two that overlap the later one lies on top
    const picture = drawn?.pictures.findLast(({ point }) => away(point) <= drawn.side / 2);
    if (picture) return picture.point;
    return this.given.cells.nearest(toPlane(this.sight, this.size, at), REACH / this.sight.scale);
  }

  private turn(event: WheelEvent): void {
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    this.look(zoomed(this.sight, this.size, spot(event), Math.exp(-event.deltaY * lines * WHEEL)));
  }

  private type(event: KeyboardEvent): void {
    const step = STEP / this.sight.scale;
    const { x, y, scale } = this.sight;
    const keys: Record<string, () => void> = {
      ArrowLeft: () => this.look({ x: x - step, y, scale }),
      ArrowRight: () => this.look({ x: x + step, y, scale }),
      ArrowUp: () => this.look({ x, y: y + step, scale }),
      ArrowDown: () => this.look({ x, y: y - step, scale }),
      "+": () => this.zoomBy(BUTTON),
      "=": () => this.zoomBy(BUTTON),
      "-": () => this.zoomBy(1 / BUTTON),
      "0": () => this.showAll(),
    };
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

const spot = (event: MouseEvent): Spot => [event.offsetX, event.offsetY];
const distance = (a: Spot, b: Spot) => Math.hypot(a[0] - b[0], a[1] - b[1]);
