// The map: a collection's layout in two dimensions, colored by cluster or by a metadata field.

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";

import { ask, askJson, collectionPath, query } from "../api";
import type { View } from "../app";
import { useLoaded } from "../loaded";
import { Chart, seen } from "../map/chart";
import { bytesOf, colorAt, shades, type Shades } from "../map/colors";
import { Names, Pictures, type Drawn as Drawing, type Seen } from "../map/overlay";
import { Cells, inside, polygonIn, written, type Polygon, type Sight, type Size, type Spot } from "../map/plane";
import { Empty, EmptyServer, Failure, Field, Heading, Loading, Tiles } from "../parts";
import { changed, go, goAbove, href, useRoute } from "../route";
import { store } from "../store";
import { count, counted, fileName, shown } from "../text";
import { Thumbnail } from "../thumbnails";
import type { Collection, Item, Legend, Selection } from "../wire";

const FIRST = 50_000; // points that are shown while the others are on their way
const MOST_IDS = 10_000; // ids of one filter
const LISTED = 24; // values of the legend that are shown
const PICTURES = 60;
const HOVER_MS = 60;
const FILES = [
  { title: "CSV", type: "text/csv", suffix: "csv" },
  { title: "Parquet", type: "application/vnd.apache.parquet", suffix: "parquet" },
];

export function MapView({ session }: View) {
  const { collection } = session;
  if (!collection)
    return (
      <>
        <Heading>Map</Heading>
        <EmptyServer title="There is no collection to draw" session={session} />
      </>
    );
  return <Drawn collection={collection} clusters={session.info.centers !== null} key={collection.name} />;
}

interface Layout {
  places: Float32Array;
  cells: Cells;
  method: string;
}

/** The layout: a first part at once where there are many, then all. */
function useLayout(path: string, items: number) {
  const read = (part: string) => async (signal: AbortSignal): Promise<Layout> => {
    const answer = await ask(`${path}/layout${part}`, { signal });
    const places = new Float32Array(await answer.arrayBuffer());
    return { places, cells: new Cells(places), method: answer.headers.get("X-Mlcd-Layout")?.split(";")[0] ?? "" };
  };
  const many = items > 2 * FIRST;
  const first = useLoaded(many ? read(query({ first: FIRST })) : null, [path, items, "first"]);
  const all = useLoaded(many && !first.value && !first.error ? null : read(""), [path, items, "all"]);
  return { ...all, value: all.value ?? first.value };
}

function Drawn({ collection, clusters }: { collection: Collection; clusters: boolean }) {
  const { params } = useRoute();
  const path = collectionPath(collection.name);
  const kinds = [...(clusters ? ["cluster"] : []), ...collection.fields.map((field) => `metadata.${field}`)];
  const given = params.get("by");
  const by = given && kinds.includes(given) ? given : kinds[0];
  const layout = useLayout(path, collection.items);
  const values = useLoaded(
    by === undefined
      ? null
      : async (signal) => new Int32Array(await (await ask(`${path}/layout/values${query({ by })}`, { signal })).arrayBuffer()),
    [path, by],
  );
  const legend = useLoaded(
    by === undefined ? null : (signal) => askJson<Legend>(`${path}/layout/legend${query({ by })}`, { signal }),
    [path, by],
  );
  const only = params.get("only");
  const polygon = usePolygon(params.get("lasso"));
  const places = layout.value?.places;
  const marks = useMemo(() => (polygon && places ? inside(polygon, places) : null), [polygon, places]);
  const colors = useColors(legend.value, only);
  const slots = useMemo(() => slotsOf(places, values.value, legend.value, marks), [places, values.value, legend.value, marks]);
  if (collection.items === 0)
    return (
      <>
        <Heading>Map</Heading>
        <Empty title="This collection is empty">
          <p>
            Add items with <code>mlcd index</code> or <code>POST /v1/collections/{collection.name}/items</code>.
          </p>
        </Empty>
      </>
    );
  return (
    <>
      <div class="bar-of-tools">
        <Heading>Map</Heading>
        <p class="soft" role="status">
          {layout.value && `${counted(layout.value.places.length / 2, "picture")}${layout.value.method && ` · ${layout.value.method}`}`}
          {layout.loading && layout.value && " · the others are on their way"}
        </p>
        {by !== undefined && (
          <div class="tools">
            <Field label="Color by">
              {(id) => (
                <select id={id} value={by} onChange={(event) => go(changed({ by: event.currentTarget.value, only: null }))}>
                  {kinds.map((kind) => (
                    <option key={kind} value={kind}>
                      {kind.replace(/^metadata\./, "")}
                    </option>
                  ))}
                </select>
              )}
            </Field>
          </div>
        )}
      </div>
      {layout.error && <Failure error={layout.error} again={layout.again} />}
      {values.error && <Failure error={values.error} again={values.again} />}
      <div class="map">
        <div class="chart-place">
          {layout.value ? (
            <Plane
              layout={layout.value}
              slots={slots}
              palette={colors.palette}
              polygon={polygon}
              collection={collection}
              values={values.value}
              legend={legend.value}
              only={only}
            />
          ) : (
            !layout.error && <Loading />
          )}
        </div>
        <aside class="map-side">
          {polygon && (
            <Selected polygon={polygon} marks={marks} collection={collection} values={values.value} legend={legend.value} />
          )}
          {legend.value && <Key legend={legend.value} only={only} colors={colors.css} collection={collection.name} />}
        </aside>
      </div>
    </>
  );
}

function usePolygon(text: string | null): Polygon | null {
  return useMemo(() => polygonIn(text), [text]);
}

const darkness = matchMedia("(prefers-color-scheme: dark)");

function useShades(): Shades {
  const [dark, setDark] = useState(darkness.matches);
  useEffect(() => {
    const follow = () => setDark(darkness.matches);
    darkness.addEventListener("change", follow);
    return () => darkness.removeEventListener("change", follow);
  }, []);
  return useMemo(() => shades(dark), [dark]);
}

/** The palette has the unknown first, then the legend in its order, then what is not chosen. */
function useColors(legend: Legend | null, only: string | null) {
  const given = useShades();
  return useMemo(() => {
    const css = legend?.values.map((_, place) => colorAt(place, given)) ?? [];
    const fits = (place: number) => only === null || shown(legend?.values[place]?.value) === only;
    const shadesOf = [
      { color: only === null ? given.unknown : given.faint, front: false },
      ...css.map((color, place) => (fits(place) ? { color, front: only !== null } : { color: given.faint, front: false })),
      { color: given.faint, front: false },
    ];
    const behind = only === null ? 255 : 128;
    const palette = Uint8Array.from(
      shadesOf.flatMap(({ color, front }, place) => [
        ...bytesOf(color),
        place === shadesOf.length - 1 ? 128 : front ? 255 : behind,
      ]),
    );
    return { css, palette };
  }, [legend, only, given]);
}

function slotsOf(
  places: Float32Array | undefined,
  values: Int32Array | null,
  legend: Legend | null,
  marks: Uint8Array | null,
): Uint16Array {
  const slots = new Uint16Array(places ? places.length / 2 : 0);
  const known = new Map(legend?.values.map(({ index }, place) => [index, place + 1]));
  const faint = known.size + 1;
  for (let at = 0; at < slots.length; at += 1) {
    if (marks && !marks[at]) slots[at] = faint;
    else if (values && at < values.length) slots[at] = known.get(values[at]!) ?? 0;
  }
  return slots;
}

interface Plane {
  layout: Layout;
  slots: Uint16Array;
  palette: Uint8Array;
  polygon: Polygon | null;
  collection: Collection;
  values: Int32Array | null;
  legend: Legend | null;
  only: string | null;
}

function Plane({ layout, slots, palette, polygon, collection, values, legend, only }: Plane) {
  const { params } = useRoute();
  const [lassoing, setLassoing] = useState(false);
  const [failure, setFailure] = useState<Error | null>(null);
  const place = useRef<HTMLDivElement>(null);
  const sight = useRef<Sight | null>(sightIn(params.get("at")));
  const timer = useRef(0);
  const [above] = useState(() => ({ seen: store<Seen | null>(null), drawn: store<Drawing | null>(null) }));
  const { hover, itemsOf } = useItems(collection.name);
  useEffect(() => () => clearTimeout(timer.current), []);
  const remember = useCallback((now: Sight, size: Size, byHand: boolean) => {
    sight.current = now;
    above.seen.set({ sight: now, size });
    if (!byHand) return;
    clearTimeout(timer.current);
    timer.current = window.setTimeout(
      () => go(changed({ at: [now.x, now.y, now.scale].map((value) => Number(value.toPrecision(5))).join(",") }), { replace: true }),
      400,
    );
  }, []);
  const choose = (chosen: Polygon) => {
    clearTimeout(timer.current); // the address of before would come after this one
    setLassoing(false);
    go(changed({ lasso: written(chosen) }));
  };
  const pick = async (point: number) => {
    const [item] = await itemsOf([point]);
    if (item) goAbove(changed({ picture: item.id }));
  };
  const colorOf = useCallback(
    (point: number) => {
      const [red, green, blue, front] = palette.subarray(4 * slots[point]!);
      return front === 255 ? `rgb(${red} ${green} ${blue})` : null;
    },
    [palette, slots],
  );
  if (failure) return <Failure error={failure} />;
  return (
    <div class="plane" ref={place}>
      <Chart
        places={layout.places}
        cells={layout.cells}
        slots={slots}
        palette={palette}
        polygon={polygon}
        lassoing={lassoing}
        sight={sight.current}
        label={`Map of ${counted(layout.places.length / 2, "picture")}. Arrow keys move it, plus and minus zoom, 0 shows all.`}
        targets={above.drawn.get}
        onSight={remember}
        onLasso={choose}
        onHover={hover.show}
        onPick={pick}
        onFailure={setFailure}
      />
      <Pictures places={layout.places} collection={collection.name} {...above} colorOf={colorOf} itemsOf={itemsOf} />
      {values && legend && (
        <Names
          places={layout.places}
          values={values}
          legend={legend}
          only={legend.values.find(({ value }) => shown(value) === only)?.index ?? null}
          nameOf={(entry) => nameOf(entry, legend.by)}
          seen={above.seen}
        />
      )}
      <div class="lasso-tools">
        <button type="button" aria-pressed={lassoing} onClick={() => setLassoing(!lassoing)} title="Or hold Shift and drag">
          Lasso
        </button>
        <button
          type="button"
          onClick={() => {
            const { clientWidth: width, clientHeight: height } = place.current!;
            if (sight.current) choose(seen(sight.current, { width, height }));
          }}
        >
          Select what is in view
        </button>
      </div>
      {hover.shown && (
        <div class="hover" style={{ left: `${hover.shown.at[0]}px`, top: `${hover.shown.at[1]}px` }}>
          <Thumbnail collection={collection.name} item={hover.shown.item} alt="" />
          <bdi>{fileName(hover.shown.item.id)}</bdi>
        </div>
      )}
    </div>
  );
}

function sightIn(text: string | null): Sight | null {
  const [x, y, scale] = (text ?? "").split(",").map(Number);
  return x !== undefined && y !== undefined && scale && [x, y, scale].every(Number.isFinite) ? { x, y, scale } : null;
}

/** The items of points, and the one below the pointer, asked for once the pointer rests. */
function useItems(collection: string) {
  const [item, setItem] = useState<{ item: Item; at: Spot; point: number } | null>(null);
  const timer = useRef(0);
  const wanted = useRef(-1);
  const known = useRef(new Map<number, Item>());
  const itemsOf = async (points: number[]): Promise<(Item | null)[]> => {
    const positions = points.filter((point) => !known.current.has(point));
    if (positions.length) {
      const json = { positions, limit: positions.length };
      const { items } = await askJson<Selection>(`${collectionPath(collection)}/layout/items`, { json });
      for (const found of items) known.current.set(found.position, found);
    }
    return points.map((point) => known.current.get(point) ?? null);
  };
  const show = (point: number, at: Spot) => {
    if (point === wanted.current) return;
    wanted.current = point;
    clearTimeout(timer.current);
    if (point < 0) {
      setItem(null);
      return;
    }
    timer.current = window.setTimeout(async () => {
      const [found] = await itemsOf([point]).catch(() => [null]);
      if (wanted.current === point) setItem(found ? { item: found, at, point } : null);
    }, HOVER_MS);
  };
  return { hover: { shown: item, show }, itemsOf };
}

interface Keyed {
  legend: Legend;
  only: string | null;
  colors: string[];
  collection: string;
}

function Key({ legend, only, colors, collection }: Keyed) {
  const [all, setAll] = useState(false);
  const listed = legend.values.slice(0, all ? undefined : LISTED);
  const chosen = legend.values.filter((entry) => shown(entry.value) === only && !listed.includes(entry));
  return (
    <section aria-labelledby="legend">
      <h2 id="legend">{legend.by.replace(/^metadata\./, "")}</h2>
      <ul class="legend">
        {[...chosen, ...listed].map((entry) => {
          const value = shown(entry.value);
          return (
            <li key={entry.index}>
              <button
                type="button"
                aria-pressed={only === value}
                onClick={() => go(changed({ only: only === value ? null : value }))}
              >
                <svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">
                  <circle cx="5" cy="5" r="5" fill={colors[legend.values.indexOf(entry)]} />
                </svg>
                <bdi>{nameOf(entry, legend.by)}</bdi>
                <span class="number">{count(entry.items)}</span>
              </button>
              {legend.by === "cluster" && only === value && (
                <a href={href(["clusters", value], { collection })}>See this cluster</a>
              )}
            </li>
          );
        })}
      </ul>
      {legend.values.length > LISTED && (
        <button type="button" class="quiet" onClick={() => setAll(!all)}>
          {all ? "Show fewer" : `Show all ${count(legend.values.length)}`}
        </button>
      )}
    </section>
  );
}

const nameOf = (entry: Legend["values"][number], by: string) =>
  entry.name ?? (by === "cluster" ? `Unnamed ${shown(entry.value)}` : shown(entry.value));

interface Chosen {
  polygon: Polygon;
  marks: Uint8Array | null;
  collection: Collection;
  values: Int32Array | null;
  legend: Legend | null;
}

function Selected({ polygon, marks, collection, values, legend }: Chosen) {
  const path = `${collectionPath(collection.name)}/layout/items`;
  const selection = useLoaded(
    (signal) => askJson<Selection>(path, { signal, json: { polygon, limit: PICTURES } }),
    [path, polygon],
  );
  const [wrong, setWrong] = useState("");
  const total = selection.value?.total;
  const save = async ({ type, suffix }: (typeof FILES)[number]) => {
    try {
      const answer = await ask(path, { json: { polygon }, headers: { Accept: type } });
      download(await answer.blob(), `${collection.name}-selected.${suffix}`);
      setWrong("");
    } catch (error) {
      setWrong((error as Error).message);
    }
  };
  return (
    <section aria-labelledby="selected" class="selected">
      <div class="bar-of-tools">
        <h2 id="selected">Selected</h2>
        <p role="status">{total !== undefined && counted(total, "picture")}</p>
        <button type="button" class="quiet" onClick={() => go(changed({ lasso: null }))}>
          Clear
        </button>
      </div>
      {selection.error && <Failure error={selection.error} again={selection.again} />}
      {total === 0 && <p class="soft">Nothing lies inside. Draw around some points.</p>}
      {total !== undefined && total > 0 && (
        <>
          <p class="actions-row">
            {FILES.map((file) => (
              <button type="button" key={file.suffix} onClick={() => save(file)}>
                Save {file.title}
              </button>
            ))}
            {total <= MOST_IDS ? (
              <a class="button" href={href(["search"], { collection: collection.name, lasso: written(polygon) })}>
                Search among these
              </a>
            ) : (
              <span class="soft">A search among at most {count(MOST_IDS)} is possible.</span>
            )}
          </p>
          {wrong && (
            <p role="alert" class="wrong">
              {wrong}
            </p>
          )}
          <Counts marks={marks} values={values} legend={legend} />
          <Tiles collection={collection.name} items={selection.value!.items} label="Selected pictures" />
        </>
      )}
    </section>
  );
}

/** How many of what is selected have each value of the legend. */
function Counts({ marks, values, legend }: Pick<Chosen, "marks" | "values" | "legend">) {
  const counts = useMemo(() => {
    const by = new Map<number, number>();
    if (marks && values)
      for (let at = 0; at < marks.length; at += 1)
        if (marks[at]) by.set(values[at]!, (by.get(values[at]!) ?? 0) + 1);
    return by;
  }, [marks, values]);
  if (!legend || !counts.size) return null;
  const listed = legend.values
    .filter(({ index }) => counts.has(index))
    .sort((one, other) => counts.get(other.index)! - counts.get(one.index)!)
    .slice(0, 8);
  return (
    <ul class="counts" aria-label="Counts">
      {listed.map((entry) => (
        <li key={entry.index}>
          <bdi>{nameOf(entry, legend.by)}</bdi> <span class="number">{count(counts.get(entry.index)!)}</span>
        </li>
      ))}
    </ul>
  );
}

function download(file: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
