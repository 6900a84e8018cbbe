// Small parts that several views share.

import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";

import { DropZone } from "./adding";
import { Refused, Unreachable } from "./api";
import type { Loaded, Paged } from "./loaded";
import { PictureLink, useSequence } from "./picture";
import type { Session } from "./session";
import { Thumbnail } from "./thumbnails";
import { shortName, similarity } from "./text";
import type { Collection, Item } from "./wire";

/** The heading of a view; it takes the focus when the view opens, so that it is read out. */
export function Heading({ children }: { children: ComponentChildren }) {
  const place = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    document.title = `${place.current!.textContent} · mlcd`;
  });
  return (
    <h1 ref={place} tabIndex={-1}>
      {children}
    </h1>
  );
}

/** A view without content says what the next step is. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

/** Of a server without what a view is about, the command that makes it all. */
export function EmptyServer(given: { title: string; session: Session; children?: ComponentChildren }) {
  return (
    <Empty title={given.title}>
      <DropZone session={given.session} />
      <p>To see your own photographs, grouped and named:</p>
      <Command text="mlcd explore ~/Pictures" />
      <p>or, with Docker, in the checkout:</p>
      <Command text="PHOTOS=~/Pictures docker compose up" />
      {given.children}
    </Empty>
  );
}

/** A command to copy. */
export function Command({ text }: { text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
  };
  return (
    <p class="command">
      <code>{text}</code>
      {"clipboard" in navigator && (
        <button type="button" onClick={copy}>
          {copied ? "Copied" : "Copy"}
        </button>
      )}
    </p>
  );
}

/** The command that makes pictures, where none of the items has one. */
export function MissingPictures({ collection, items }: { collection: Collection; items: Item[] }) {
  if (!items.length || items.some((item) => item.thumbnail)) return null;
  return (
    <>
      <p class="soft">
        These items have no pictures yet. This command makes them; a collection in a folder takes it with the server
        stopped:
      </p>
      <Command text={`mlcd index EMBEDDINGS STATE/collections/${collection.name}`} />
    </>
  );
}

export function Failure({ error, again }: { error: Error; again?: () => void }) {
  // The banner above says that the server is gone, and the key's dialog that one is needed.
  const title = error instanceof Unreachable ? "The server does not answer" : "That did not work";
  const next =
    error instanceof Unreachable ? "This view loads by itself when the server is back." : error.message;
  return (
    <div class="failure" role="alert">
      <h2>{title}</h2>
      <p>{error instanceof Refused && error.status === 401 ? "Enter an API key to go on." : next}</p>
      {again && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
    </div>
  );
}

/** The value once it is there; before that, a quiet sign that it is coming. */
export function Once<T>(given: {
  loaded: Loaded<T>;
  children: (value: T) => ComponentChildren;
}) {
  const { value, error, loading, again } = given.loaded;
  if (error) return <Failure error={error} again={again} />;
  if (value === null) return loading ? <Loading /> : null;
  return <div class={loading ? "stale" : ""}>{given.children(value)}</div>;
}

export function Loading() {
  return (
    <p class="loading" role="status">
      Loading…
    </p>
  );
}

/** The end of a list: loads the next page when it comes into sight, or when asked. */
export function More({ paged }: { paged: Pick<Paged<unknown>, "more" | "loading" | "error" | "again"> }) {
  const place = useRef<HTMLButtonElement>(null);
  const { more, loading, error, again } = paged;
  useEffect(() => {
    if (!more || loading || error) return;
    const watcher = new IntersectionObserver(
      (entries) => entries.some((entry) => entry.isIntersecting) && more(),
      { rootMargin: "200px" },
    );
    watcher.observe(place.current!);
    return () => watcher.disconnect();
  }, [more, loading, error]);
  if (error) return <Failure error={error} again={again} />;
  if (!more) return null;
  return (
    <p class="more">
      <button type="button" ref={place} onClick={more} disabled={loading}>
        {loading ? "Loading…" : "Show more"}
      </button>
    </p>
  );
}

interface Tiles {
  collection: string;
  items: Item[];
  label: string;
  /** What else is shown below a picture. */
  actions?: (item: Item) => ComponentChildren;
}

/** A list of pictures, each of which opens large. */
export function Tiles({ collection, items, label, actions }: Tiles) {
  useSequence(items);
  return (
    <>
      {items.length > 0 && !items.some((item) => item.thumbnail) && (
        <p class="soft small">
          There are no thumbnails: <code>mlcd index STATE/collections/{collection} STATE/collections/{collection} --images IMAGES</code>{" "}
          makes them.
        </p>
      )}
      <ul class="tiles" aria-label={label}>
        {items.map((item) => (
          <li key={item.id} class="tile">
            <PictureLink item={item} title={item.id}>
              <Thumbnail collection={collection} item={item} alt="" />
              <span class="tile-name">
                <bdi>{shortName(item.id)}</bdi>
                {item.similarity !== null && item.similarity !== undefined && (
                  <span class="number">
                    <span class="unseen">similarity </span>
                    {similarity(item.similarity)}
                  </span>
                )}
              </span>
            </PictureLink>
            {actions && <span class="actions">{actions(item)}</span>}
          </li>
        ))}
      </ul>
    </>
  );
}

/** What is folded where the window is narrow. */
export function Fold(given: { title: string; class: string; children: ComponentChildren }) {
  const [open, setOpen] = useState(false);
  return (
    <div class={`fold ${given.class}${open ? " open" : ""}`}>
      <button type="button" class="fold-button" aria-expanded={open} onClick={() => setOpen(!open)}>
        {given.title}
      </button>
      <div class="folded">{given.children}</div>
    </div>
  );
}

export function Field(given: { label: string; children: (id: string) => ComponentChildren }) {
  const id = useId();
  return (
    <span class="field">
      <label for={id}>{given.label}</label>
      {given.children(id)}
    </span>
  );
}

/** Asks once, in a dialog of the browser's own kind, with focus and Escape as everywhere. */
export function Dialog(given: {
  title: string;
  onClose(): void;
  children: ComponentChildren;
}) {
  const place = useRef<HTMLDialogElement>(null);
  const title = useId();
  useLayoutEffect(() => place.current!.showModal(), []);
  return (
    <dialog ref={place} aria-labelledby={title} onClose={given.onClose}>
      <h2 id={title}>{given.title}</h2>
      {given.children}
    </dialog>
  );
}

/** A share of the widest value, as a bar behind it. */
export function Bar({ share }: { share: number }) {
  return <span class="bar" aria-hidden="true" style={{ width: `calc((100% - 4.5em) * ${Math.max(0.01, share)})` }} />;
}
