// Numbers, names and times as people read them.

const whole = new Intl.NumberFormat("en-US");
const plural = new Intl.PluralRules("en-US");
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export const count = (number: number) => whole.format(number);

export const counted = (number: number, noun: string) =>
  `${count(number)} ${noun}${plural.select(number) === "one" ? "" : "s"}`;

export const similarity = (value: number) => value.toFixed(2);

export const percent = (share: number) =>
  `${share > 0 && share < 0.0995 ? (100 * share).toFixed(1) : Math.round(100 * share)}\u00a0%`;

export const clusterName = (center: { id: number; name: string | null }) =>
  center.name ?? `Unnamed ${center.id}`;

/** The cluster that a center was merged into, and its place on the coarser levels. */
export const belongs = (center: { id: number; cluster: number; path: string | null }) =>
  [center.cluster === center.id ? "" : `part of ${center.cluster}`, center.path ?? ""].filter(Boolean).join(" · ");

/** The last part of an item's id, which is a file's name for most. */
export const fileName = (id: string) => id.split("/").at(-1) || id;

/** That without the suffix of a picture, where there is little room. */
export const shortName = (id: string) => fileName(id).replace(/(?<=.)\.(jpe?g|png|webp|gif|bmp|tiff?)$/i, "");

export const when = (time: string) => moment.format(new Date(time));

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const shown = (value: unknown): string =>
  typeof value === "string" ? value : Array.isArray(value) ? value.map(shown).join(", ") : String(JSON.stringify(value));
