// Pictures of items. Where a key is set the page asks for them itself, since an <img> cannot send
// one, and shows blobs, of which a bounded number is kept.

import { useEffect, useRef, useState } from "preact/hooks";

import { address, ask, collectionPath, key } from "./api";
import { useStore } from "./store";
import { fileName } from "./text";
import type { Item } from "./wire";

const MOST_BLOBS = 1000; // about 5 kB each
const AT_ONCE = 8;

const blobs = new Map<string, Promise<string>>();
const waiting: (() => void)[] = [];
let running = 0;

key.watch(() => {
  for (const url of [...blobs.keys()]) forget(url);
});

function forget(path: string): void {
  blobs.get(path)?.then(URL.revokeObjectURL, () => undefined);
  blobs.delete(path);
}

function blobOf(path: string): Promise<string> {
  const known = blobs.get(path) ?? fetched(path);
  // The last one asked for is the last one forgotten.
  blobs.delete(path);
  blobs.set(path, known);
  known.catch(() => blobs.delete(path));
  if (blobs.size > MOST_BLOBS) forget(blobs.keys().next().value!);
  return known;
}

async function fetched(path: string): Promise<string> {
  if (running >= AT_ONCE) await new Promise<void>((resolve) => waiting.push(resolve));
  running += 1;
  try {
    return URL.createObjectURL(await (await ask(path)).blob());
  } finally {
    running -= 1;
    waiting.shift()?.();
  }
}

const seen = new WeakMap<Element, () => void>();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      seen.get(target)?.();
    }
  },
  { rootMargin: "300px" },
);

interface Given {
  collection: string;
  item: Item;
  /** The text for those who cannot see it; "" where the text beside it says the same. */
  alt?: string;
}

export function Thumbnail({ collection, item, alt = fileName(item.id) }: Given) {
  const [broken, setBroken] = useState(false);
  const keyed = useStore(key) !== "";
  if (!item.thumbnail || broken) return <Placeholder item={item} alt={alt} />;
  const path = `${collectionPath(collection)}/items/${encodeURIComponent(item.id)}/thumbnail?v=${item.thumbnail}`;
  const given = { path, alt, onError: () => setBroken(true) };
  return keyed ? <Blob key={path} {...given} /> : <Plain key={path} {...given} />;
}

/** A large picture; nothing where it cannot be had. */
export function Picture({ path }: { path: string }) {
  const [broken, setBroken] = useState(false);
  const keyed = useStore(key) !== "";
  if (broken) return null;
  const given = { path, alt: "", onError: () => setBroken(true) };
  return keyed ? <Blob key={path} {...given} /> : <Plain key={path} {...given} />;
}

interface Shown {
  path: string;
  alt: string;
  onError(): void;
}

function Plain({ path, alt, onError }: Shown) {
  return <img src={address(path)} alt={alt} loading="lazy" decoding="async" onError={onError} />;
}

function Blob({ path, alt, onError }: Shown) {
  const place = useRef<HTMLImageElement>(null);
  const [url, setUrl] = useState("");
  useEffect(() => {
    const image = place.current!;
    let gone = false;
    seen.set(image, () => {
      blobOf(path).then((blob) => gone || setUrl(blob), () => gone || onError());
    });
    watcher.observe(image);
    return () => {
      gone = true;
      watcher.unobserve(image);
    };
  }, [path]);
  return <img ref={place} src={url || undefined} alt={alt} onError={onError} />;
}

function Placeholder({ item, alt }: { item: Item; alt: string }) {
  return (
    <span class="no-picture" role={alt ? "img" : undefined} aria-label={alt || undefined} aria-hidden={!alt}>
      <bdi>{fileName(item.id)}</bdi>
    </span>
  );
}

/** The nearest members of a cluster, the first one large. */
export function Mosaic({ collection, items }: { collection: string; items: Item[] }) {
  return (
    <span class="mosaic" aria-hidden="true">
      {items.slice(0, 6).map((item) => (
        <span key={item.id}>
          <Thumbnail collection={collection} item={item} alt="" />
        </span>
      ))}
    </span>
  );
}
