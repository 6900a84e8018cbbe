// A picture that a person gives becomes an embedding, and that, a byte a dimension, is the address
// of its search: it can be reloaded and goes with the back button. The picture stays in memory.

import { askJson } from "./api";
import { changed, go, href, route } from "./route";
import { store } from "./store";
import type { Embedded } from "./wire";

const MOST_PICTURES = 20;
/** What a new query takes the place of; filters stay. */
export const NOTHING_ELSE = { text: null, like: null, vector: null, without: null, top: null };

export interface Reading {
  name: string;
  error: Error | null;
}

/** The picture that is on its way, or why it did not get there. */
export const reading = store<Reading | null>(null);
const pictures = new Map<string, string>();

export const pictureOf = (vector: string) => pictures.get(vector);

export async function searchBy(file: Blob, name: string, collection: string | undefined): Promise<void> {
  reading.set({ name, error: null });
  try {
    const headers = { "Content-Type": file.type || "application/octet-stream" };
    const answer = await askJson<Embedded>("v1/images/embed", { body: file, headers });
    const embedding = answer.results[0]?.embedding;
    if (!embedding) throw new Error(`${name}: ${answer.errors[0]?.detail ?? "no embedding"}`);
    const vector = packed(embedding);
    keep(vector, file);
    reading.set(null);
    go(route().path[0] === "search" ? changed({ ...NOTHING_ELSE, vector }) : href(["search"], { collection, vector }));
  } catch (error) {
    reading.set({ name, error: error as Error });
  }
}

function keep(vector: string, file: Blob): void {
  pictures.set(vector, URL.createObjectURL(file));
  if (pictures.size <= MOST_PICTURES) return;
  const [oldest, url] = pictures.entries().next().value!;
  URL.revokeObjectURL(url);
  pictures.delete(oldest);
}

export function packed(embedding: number[]): string {
  const largest = Math.max(...embedding.map(Math.abs)) || 1;
  const bytes = Int8Array.from(embedding, (value) => Math.round((127 * value) / largest));
  const text = String.fromCharCode(...new Uint8Array(bytes.buffer));
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The unit vector behind an address; null where it is none. */
export function unpacked(vector: string): number[] | null {
  try {
    const text = atob(vector.replaceAll("-", "+").replaceAll("_", "/"));
    const values = [...Int8Array.from(text, (letter) => letter.charCodeAt(0))];
    const length = Math.hypot(...values);
    return length ? values.map((value) => value / length) : null;
  } catch {
    return null;
  }
}

/** The first picture among what was dropped or pasted. */
export function pictureIn(data: DataTransfer | null): File | null {
  return [...(data?.files ?? [])].find((file) => file.type.startsWith("image/")) ?? null;
}
