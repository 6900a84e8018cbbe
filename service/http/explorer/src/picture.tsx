// One picture, large, above the view that it was opened from. Its address is that of the view with
// the picture's id, so that the list it stands in is there after a reload, too.

import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useRef } from "preact/hooks";

import { askJson, collectionPath, query } from "./api";
import { useLoaded } from "./loaded";
import { Failure, Once } from "./parts";
import { changed, go, goAbove, goBelow, href } from "./route";
import { store, useStore } from "./store";
import { clusterName, count, fileName, shown, similarity } from "./text";
import { Picture, Thumbnail } from "./thumbnails";
import type { Exploration, Found, Item, Labeled, Metadata } from "./wire";
import type { Session } from "./session";

const NEIGHBORS = 12;
const LABELS = 5;
const SIDE = 1024;

/** The lists of pictures that the view shows, the first one first. */
const lists = store<readonly (readonly Item[])[]>([]);

/** Lets a picture of these have the others beside it. */
export function useSequence(items: readonly Item[]): void {
  useEffect(() => {
    lists.set([...lists.get(), items]);
    return () => lists.set(lists.get().filter((list) => list !== items));
  }, [items]);
}

interface Linked {
  item: Item;
  title?: string;
  children: ComponentChildren;
}

/** A link that opens a picture above the view. */
export function PictureLink({ item, title, children }: Linked) {
  const address = () => changed({ picture: item.id });
  const open = (event: MouseEvent) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // in a tab or window of its own
    event.preventDefault();
    goAbove(address());
  };
  return (
    <a href={address()} title={title} onClick={open}>
      {children}
    </a>
  );
}

interface Given {
  id: string;
  session: Session;
  exploration: Exploration | null;
}

export function PictureView({ id, session, exploration }: Given) {
  const collection = session.collection?.name;
  const place = useRef<HTMLDialogElement>(null);
  const title = useId();
  const list = useStore(lists).find((items) => items.some((item) => item.id === id)) ?? [];
  const at = list.findIndex((item) => item.id === id);
  const close = () => place.current!.close();
  const gone = useRef(false);
  const step = (by: number) => {
    const item = list[at + by];
    if (at >= 0 && item) go(changed({ picture: item.id }), { replace: true });
  };
  useLayoutEffect(() => {
    const dialog = place.current!;
    dialog.showModal();
    return () => {
      gone.current = true;
      dialog.close(); // gives the focus back
    };
  }, []);
  useEffect(() => void place.current!.scrollTo(0, 0), [id]);
  return (
    <dialog
      ref={place}
      class="picture"
      aria-labelledby={title}
      onClose={() => gone.current || goBelow(changed({ picture: null }))}
      onClick={(event) => event.target === place.current && close()}
      onKeyDown={(event) => {
        if (event.key === "ArrowLeft") step(-1);
        if (event.key === "ArrowRight") step(1);
      }}
    >
      <div class="picture-frame">
        <div class="picture-bar">
          <h2 id={title}>
            <bdi>{fileName(id)}</bdi>
          </h2>
          {at >= 0 && list.length > 1 && (
            <span class="picture-steps">
              <button type="button" aria-label="Previous picture" disabled={at === 0} onClick={() => step(-1)}>
                ←
              </button>
              <span class="number" role="status">
                {count(at + 1)} of {count(list.length)}
              </span>
              <button type="button" aria-label="Next picture" disabled={at === list.length - 1} onClick={() => step(1)}>
                →
              </button>
            </span>
          )}
          <button type="button" onClick={close} aria-label="Close">
            ×
          </button>
        </div>
        {collection === undefined ? (
          <Failure error={new Error("This server has no collection that holds the picture.")} />
        ) : (
          <Described {...{ id, collection, session }} known={list[at]} large={exploration?.collection === collection} key={id} />
        )}
      </div>
    </dialog>
  );
}

interface DescribedItem extends Item {
  embedding: number[];
}

interface Shown {
  id: string;
  collection: string;
  session: Session;
  /** What the list that it stands in knows. */
  known: Item | undefined;
  /** Whether the server makes pictures larger than thumbnails. */
  large: boolean;
}

function Described({ id, collection, session, known, large }: Shown) {
  const path = collectionPath(collection);
  const item = useLoaded(
    (signal) => askJson<DescribedItem>(`${path}/items/${encodeURIComponent(id)}?embedding=true`, { signal }),
    [path, id],
  );
  return (
    <div class="picture-parts">
      <figure>
        {(item.value ?? known) && <Thumbnail collection={collection} item={(item.value ?? known)!} />}
        {large && <Picture path={`v1/exploration/pictures/${id.split("/").map(encodeURIComponent).join("/")}?side=${SIDE}`} />}
      </figure>
      <div class="picture-facts">
        <Once loaded={item}>
          {({ metadata, embedding }) => (
            <>
              <p>
                <a class="button" href={href(["search"], { collection, like: id })}>
                  Search similar
                </a>
              </p>
              <Facts metadata={{ path: id, ...metadata }} />
              {session.info.centers && <Labels embedding={embedding} collection={collection} id={id} />}
              <Neighbors id={id} collection={collection} />
            </>
          )}
        </Once>
      </div>
    </div>
  );
}

/** What is known of an item beside its picture. */
export function Facts({ metadata }: { metadata: Metadata }) {
  return (
    <dl class="metadata">
      {Object.entries(metadata).map(([field, value]) => (
        <div key={field}>
          <dt>{field}</dt>
          <dd>
            <bdi>{shown(value)}</bdi>
          </dd>
        </div>
      ))}
    </dl>
  );
}

function Labels({ embedding, collection, id }: { embedding: number[]; collection: string; id: string }) {
  const title = useId();
  const labeled = useLoaded(
    (signal) => askJson<Labeled>(`v1/labels${query({ top: LABELS })}`, { json: { embeddings: [embedding] }, signal }),
    [collection, id],
  );
  return (
    <section aria-labelledby={title}>
      <h3 id={title}>Clusters</h3>
      <Once loaded={labeled}>
        {({ results }) => (
          <ul class="counts">
            {results[0]?.labels.map((label) => (
              <li key={label.id}>
                <a href={href(["clusters", label.id], { collection })}>
                  <bdi>{clusterName(label)}</bdi>
                </a>
                <span class="number">
                  <span class="unseen">similarity </span>
                  {similarity(label.similarity)}
                </span>
              </li>
            ))}
          </ul>
        )}
      </Once>
    </section>
  );
}

function Neighbors({ id, collection }: { id: string; collection: string }) {
  const title = useId();
  const found = useLoaded(
    (signal) =>
      askJson<Found>(`${collectionPath(collection)}/search`, { json: { ids: [id], top: NEIGHBORS + 1, metadata: false }, signal }),
    [collection, id],
  );
  return (
    <section aria-labelledby={title}>
      <h3 id={title}>Most similar</h3>
      <Once loaded={found}>
        {({ results }) => (
          <ul class="neighbors">
            {results[0]?.matches
              .filter((match) => match.id !== id)
              .slice(0, NEIGHBORS)
              .map((match) => (
                <li key={match.id}>
                  <PictureLink item={match} title={match.id}>
                    <Thumbnail collection={collection} item={match} />
                    <span class="number">
                      <span class="unseen">similarity </span>
                      {similarity(match.similarity ?? 0)}
                    </span>
                  </PictureLink>
                </li>
              ))}
          </ul>
        )}
      </Once>
    </section>
  );
}
