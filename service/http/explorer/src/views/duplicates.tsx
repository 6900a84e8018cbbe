// Near-duplicates side by side: what is not kept is marked, and deleted after one question.

import { useMemo, useState } from "preact/hooks";

import { askJson, collectionPath, Refused } from "../api";
import type { View } from "../app";
import { connection } from "../connection";
import { useLoaded } from "../loaded";
import { Dialog, Empty, EmptyServer, Field, Heading, MissingPictures, Once } from "../parts";
import { changed, go, useRoute } from "../route";
import { counted, fileName, shown } from "../text";
import { Thumbnail } from "../thumbnails";
import type { Collection, DuplicateGroup, Duplicates as Found, Item, Outcomes } from "../wire";

const DEFAULT = "0.95"; // of look-alikes
const PAGE = 30;

export function Duplicates({ session }: View) {
  const { collection } = session;
  return (
    <>
      {collection ? (
        <Groups collection={collection} key={collection.name} />
      ) : (
        <>
          <Heading>Duplicates</Heading>
          <EmptyServer title="There is no collection to look through" session={session} />
        </>
      )}
    </>
  );
}

function Groups({ collection }: { collection: Collection }) {
  // Without it: copies of one picture.
  const given = useRoute().params.get("similarity");
  const least = given === null ? null : Number(given) || Number(DEFAULT);
  const [marked, setMarked] = useState<ReadonlySet<string>>(new Set());
  const [asking, setAsking] = useState(false);
  const [page, setPage] = useState(PAGE);
  const path = collectionPath(collection.name);
  const found = useLoaded(
    (signal) => askJson<Found>(`${path}/duplicates`, { signal, json: least === null ? {} : { similarity: least } }),
    [path, least],
    { keep: true },
  );
  const groups = useMemo(() => (found.value?.groups ?? []).map(itemsOf), [found.value]);
  const toggle = (id: string) => {
    const now = new Set(marked);
    if (!now.delete(id)) now.add(id);
    setMarked(now);
  };
  const keepFirst = () => setMarked(new Set(groups.flatMap((items) => items.slice(1).map((item) => item.id))));
  return (
    <>
      <div class="bar-of-tools">
        <Heading>Duplicates</Heading>
        <p class="soft" role="status">
          {found.value && counted(groups.length, "group")}
        </p>
        <div class="tools">
          <Field label="Show">
            {(id) => (
              <select
                id={id}
                value={least === null ? "copies" : "alike"}
                onChange={(event) =>
                  go(changed({ similarity: event.currentTarget.value === "copies" ? null : DEFAULT }))
                }
              >
                <option value="copies">Copies of one picture</option>
                <option value="alike">All that look alike</option>
              </select>
            )}
          </Field>
          {least !== null && (
            <Field label={`At least as similar as ${least.toFixed(3)}`}>
              {(id) => (
                <input
                  id={id}
                  type="range"
                  min={0.8}
                  max={1}
                  step={0.005}
                  value={least}
                  onChange={(event) => go(changed({ similarity: event.currentTarget.value }))}
                />
              )}
            </Field>
          )}
          {groups.length > 0 && collection.writable && (
            <button type="button" onClick={keepFirst}>
              Keep the first of each
            </button>
          )}
        </div>
      </div>
      {!collection.writable && <p class="soft">This server can only read the collection: nothing can be deleted here.</p>}
      <Once loaded={found}>
        {({ nearest }) => (
          <>
            {groups.length === 0 && (
              <Empty title={least === null ? "No picture is there twice" : "No two pictures are that similar"}>
                {nearest && <p>These two come nearest:</p>}
              </Empty>
            )}
            {groups.length === 0 && nearest && (
              <Group items={itemsOf(nearest)} {...{ collection, marked, toggle }} />
            )}
            <MissingPictures collection={collection} items={groups.slice(0, page).flat()} />
            {groups.slice(0, page).map((items) => (
              <Group key={items[0]!.id} {...{ items, collection, marked, toggle }} />
            ))}
            {groups.length > page && (
              <p class="more">
                <button type="button" onClick={() => setPage(page + PAGE)}>
                  Show more
                </button>
              </p>
            )}
          </>
        )}
      </Once>
      {marked.size > 0 && (
        <div class="verdict" role="region" aria-label="Chosen for deletion">
          <span role="status">{counted(marked.size, "picture")} marked</span>
          <button type="button" class="quiet" onClick={() => setMarked(new Set())}>
            Keep all
          </button>
          <button type="button" class="danger" onClick={() => setAsking(true)}>
            Delete…
          </button>
        </div>
      )}
      {asking && (
        <Deletion
          collection={collection}
          ids={[...marked]}
          onClose={() => setAsking(false)}
          onDone={() => {
            setAsking(false);
            setMarked(new Set());
            connection.refresh();
          }}
        />
      )}
    </>
  );
}

/** The items of a group, each with its similarity to the nearest other one. */
function itemsOf({ ids, similarities, metadata, thumbnails }: DuplicateGroup): Item[] {
  return ids.map((id, at) => ({
    id,
    similarity: similarities[at],
    metadata: metadata[at],
    thumbnail: thumbnails[at] ?? null,
  }));
}

interface GroupOf {
  items: Item[];
  collection: Collection;
  marked: ReadonlySet<string>;
  toggle(id: string): void;
}

function Group({ items, collection, marked, toggle }: GroupOf) {
  return (
    <div class="group" role="group" aria-label={counted(items.length, "near-duplicate")}>
      <ul class="tiles large">
        {items.map((item) => (
          <li key={item.id} class={marked.has(item.id) ? "tile marked" : "tile"}>
            <label>
              <Thumbnail collection={collection.name} item={item} alt="" />
              <span class="tile-name">
                <bdi title={item.id}>{fileName(item.id)}</bdi>
                <span class="number">
                  <span class="unseen">similarity </span>
                  {(item.similarity ?? 0).toFixed(3)}
                </span>
              </span>
              <Described item={item} />
              {collection.writable && (
                <span class="choice">
                  <input type="checkbox" checked={marked.has(item.id)} onChange={() => toggle(item.id)} />
                  delete
                </span>
              )}
            </label>
          </li>
        ))}
      </ul>
    </div>
  );
}

function Described({ item }: { item: Item }) {
  const fields = Object.entries(item.metadata ?? {}).slice(0, 3);
  if (!fields.length) return null;
  return (
    <span class="soft small">
      {fields.map(([field, value]) => (
        <span key={field}>
          {field}: <bdi>{shown(value)}</bdi>{" "}
        </span>
      ))}
    </span>
  );
}

interface Asked {
  collection: Collection;
  ids: string[];
  onClose(): void;
  onDone(): void;
}

function Deletion({ collection, ids, onClose, onDone }: Asked) {
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  const remove = async () => {
    setBusy(true);
    try {
      await askJson<Outcomes>(`${collectionPath(collection.name)}/delete`, { json: { ids } });
      onDone();
    } catch (error) {
      setBusy(false);
      const scope = error instanceof Refused && error.status === 403;
      setWrong(scope ? "This key may only read. Enter one with the scope write." : (error as Error).message);
    }
  };
  return (
    <Dialog title={`Delete ${counted(ids.length, "picture")} from ${collection.name}?`} onClose={onClose}>
      <p>
        They leave the collection, with their thumbnails, and are found no more. The original files stay. This cannot be
        taken back.
      </p>
      <p role="alert" class="wrong">
        {wrong}
      </p>
      <p class="actions-row">
        <button type="button" onClick={onClose}>
          Keep them
        </button>
        <button type="button" class="danger" disabled={busy} onClick={remove}>
          {busy ? "Deleting…" : `Delete ${counted(ids.length, "picture")}`}
        </button>
      </p>
    </Dialog>
  );
}
