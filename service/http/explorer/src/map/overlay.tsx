// What stands above the points of the map: the names of their values and, where few enough are in
// sight, the pictures themselves. Both are moved by hand: a frame has no time to render.

import { useEffect, useMemo, useRef } from "preact/hooks";

import { useSequence } from "../picture";
import { useStore, type Store } from "../store";
import { Thumbnail } from "../thumbnails";
import type { Item, Legend } from "../wire";
import { toScreen, type Sight, type Size, type Spot } from "./plane";

const MOST_NAMES = 60;
const SAMPLE = 50_000; // points; the first ones are a fair sample
const GAP = 4; // pixels between two names
const MOST_PICTURES = 500;
const STILL_MS = 120;
const [LEAST_SIDE, MOST_SIDE] = [30, 112]; // pixels
const SHARE = 0.85; // of its part of the window that a picture takes
const APART = 0.8; // of its side that it lies from others at least

export interface Seen {
  sight: Sight;
  size: Size;
}

interface Named {
  places: Float32Array;
  values: Int32Array;
  legend: Legend;
  only: number | null;
  nameOf(entry: Legend["values"][number]): string;
  seen: Store<Seen | null>;
}

export function Names({ places, values, legend, only, nameOf, seen }: Named) {
  const layer = useRef<HTMLDivElement>(null);
  const named = useMemo(() => {
    const shown = legend.values.filter(({ index }) => (only === null ? index >= 0 : index === only));
    // where there is no room for all, a name says more than a number
    return shown.sort((one, other) => Number(one.name === null) - Number(other.name === null)).slice(0, MOST_NAMES);
  }, [legend, only]);
  const anchors = useMemo(() => medians(places, values, named.map(({ index }) => index)), [places, values, named]);
  useEffect(() => {
    const spans = [...layer.current!.children] as HTMLElement[];
    const sizes = spans.map(({ offsetWidth, offsetHeight }) => ({ width: offsetWidth, height: offsetHeight }));
    const move = () => {
      const now = seen.get();
      if (!now) return;
      const taken: [number, number, number, number][] = [];
      for (const [at, span] of spans.entries()) {
        const { width, height } = sizes[at]!;
        const anchor = anchors[at];
        const [x, y] = anchor ? toScreen(now.sight, now.size, anchor) : [-width, 0];
        const [left, top] = [x - width / 2, y - height / 2];
        const free =
          left >= 0 && top >= 0 && left + width <= now.size.width && top + height <= now.size.height &&
          taken.every(([l, t, r, b]) => left > r || top > b || left + width < l || top + height < t);
        span.style.visibility = free ? "visible" : "hidden";
        if (!free) continue;
        span.style.transform = `translate(${left}px, ${top}px)`;
        taken.push([left - GAP, top - GAP, left + width + GAP, top + height + GAP]);
      }
    };
    move();
    return seen.watch(move);
  }, [named, anchors, seen]);
  return (
    <div class="map-names" ref={layer} aria-hidden="true">
      {named.map((entry) => (
        <bdi key={entry.index}>{nameOf(entry)}</bdi>
      ))}
    </div>
  );
}

/** The middle of the points of each value; null where it has none. */
function medians(places: Float32Array, values: Int32Array, wanted: number[]): (Spot | null)[] {
  const points = new Map<number, [number[], number[]]>(wanted.map((value) => [value, [[], []]]));
  const num = Math.min(SAMPLE, values.length, places.length / 2);
  for (let at = 0; at < num; at += 1) {
    const own = points.get(values[at]!);
    if (own) (own[0].push(places[2 * at]!), own[1].push(places[2 * at + 1]!));
  }
  const middle = (all: number[]) => all.sort((a, b) => a - b)[all.length >> 1]!;
  return wanted.map((value) => {
    const [xs, ys] = points.get(value)!;
    return xs.length ? [middle(xs), middle(ys)] : null;
  });
}

/** Points that are drawn as pictures. side: pixels. */
export interface Drawn {
  pictures: { point: number; item: Item }[];
  side: number;
}

interface Pictured {
  places: Float32Array;
  collection: string;
  seen: Store<Seen | null>;
  drawn: Store<Drawn | null>;
  /** Its color, as of CSS; null for a point that lies behind the others. */
  colorOf(point: number): string | null;
  itemsOf(points: number[]): Promise<(Item | null)[]>;
}

export function Pictures({ places, collection, seen, drawn, colorOf, itemsOf }: Pictured) {
  const layer = useRef<HTMLDivElement>(null);
  const now = useStore(drawn);
  useSequence(useMemo(() => now?.pictures.map(({ item }) => item) ?? [], [now]));
  useEffect(() => {
    let timer = 0;
    let gone = false;
    const choose = async () => {
      const chosen = chosenOf(places, seen.get(), (point) => colorOf(point) !== null);
      const items = chosen ? await itemsOf(chosen.points).catch(() => []) : [];
      if (gone) return;
      const pictures = items.flatMap((item, at) => (item?.thumbnail ? { item, point: chosen!.points[at]! } : []));
      drawn.set(chosen && pictures.length ? { pictures, side: chosen.side } : null);
    };
    const later = () => {
      clearTimeout(timer);
      timer = window.setTimeout(choose, STILL_MS);
    };
    later();
    const unwatch = seen.watch(later);
    return () => {
      gone = true;
      clearTimeout(timer);
      unwatch();
    };
  }, [places, seen, drawn, colorOf]);
  useEffect(() => {
    const spans = [...layer.current!.children] as HTMLElement[];
    const move = () => {
      const { sight, size } = seen.get()!;
      for (const [at, span] of spans.entries()) {
        const { point } = now!.pictures[at]!;
        const [x, y] = toScreen(sight, size, [places[2 * point]!, places[2 * point + 1]!]);
        span.style.transform = `translate(${x - now!.side / 2}px, ${y - now!.side / 2}px)`;
      }
    };
    if (!now || !seen.get()) return;
    move();
    return seen.watch(move);
  }, [now, places, seen]);
  return (
    <div class="map-pictures" ref={layer} aria-hidden="true">
      {now?.pictures.map(({ point, item }) => (
        <span
          key={point}
          style={{ width: `${now.side}px`, height: `${now.side}px`, borderColor: colorOf(point) ?? undefined }}
        >
          <Thumbnail collection={collection} item={item} alt="" />
        </span>
      ))}
    </div>
  );
}

/** Points in sight that do not cover each other; null where there are none, or too many. */
function chosenOf(places: Float32Array, now: Seen | null, fits: (point: number) => boolean) {
  if (!now) return null;
  const { sight, size } = now;
  const [reachX, reachY] = [size.width / 2 / sight.scale, size.height / 2 / sight.scale];
  const inSight: number[] = [];
  for (let at = 0; 2 * at < places.length; at += 1) {
    if (Math.abs(places[2 * at]! - sight.x) > reachX || Math.abs(places[2 * at + 1]! - sight.y) > reachY) continue;
    if (inSight.push(at) > MOST_PICTURES) return null;
  }
  const points = inSight.filter(fits);
  if (!points.length) return null;
  const part = SHARE * Math.sqrt((size.width * size.height) / points.length);
  const side = Math.round(Math.max(LEAST_SIDE, Math.min(MOST_SIDE, part)));
  const apart = (APART * side) / sight.scale;
  const near = (one: number, other: number) =>
    Math.abs(places[2 * one]! - places[2 * other]!) < apart && Math.abs(places[2 * one + 1]! - places[2 * other + 1]!) < apart;
  const chosen: number[] = [];
  for (const point of points) if (!chosen.some((other) => near(point, other))) chosen.push(point);
  return { points: chosen, side };
}
