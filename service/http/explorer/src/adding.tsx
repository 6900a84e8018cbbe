// Pictures of a person's own: dropped on a page without any, they become a collection.

import type { TargetedEvent } from "preact";

import { askJson, collectionPath, Refused } from "./api";
import { connection } from "./connection";
import { go, href } from "./route";
import type { Session } from "./session";
import { store, useStore } from "./store";
import { count, counted } from "./text";
import type { Outcomes } from "./wire";

/** The collection that dropped pictures go to. */
const COLLECTION = "pictures";
const MOST_TOGETHER = 16; // pictures of one request, so that progress is shown soon
const TOO_LARGE = 413;

interface Adding {
  total: number;
  done: number;
  added: number;
  errors: string[];
}

interface NamedFile {
  id: string;
  file: File;
}

const adding = store<Adding | null>(null);

/** Whether pictures can be added here: where there are none yet, and to those that were added. */
export const takesPictures = ({ info, collections, collection }: Session) =>
  collection ? collection.name === COLLECTION && collection.writable : info.creates_collections && !collections.length;

/** The files of a drop, those in folders too, with the folders in their names. */
export async function filesIn(data: DataTransfer): Promise<NamedFile[]> {
  // An entry must be asked for before anything is awaited: then the browser empties `data`.
  const entries = [...data.items].flatMap((item) => item.webkitGetAsEntry() ?? []);
  return (await Promise.all(entries.map(filesOf))).flat();
}

async function filesOf(entry: FileSystemEntry): Promise<NamedFile[]> {
  if (entry.name.startsWith(".")) return [];
  if (entry.isFile) {
    const file = await new Promise<File>((take, fail) => (entry as FileSystemFileEntry).file(take, fail));
    return [{ id: entry.fullPath.replace(/^\//, ""), file }];
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  const files: NamedFile[] = [];
  for (;;) {
    const entries = await new Promise<FileSystemEntry[]>((take, fail) => reader.readEntries(take, fail));
    if (!entries.length) return files;
    for (const below of entries) files.push(...(await filesOf(below)));
  }
}

/** Adds pictures to the collection, a few at a time, and shows it. */
export async function addPictures(files: NamedFile[], { info }: Session): Promise<void> {
  if (isAdding(adding.get())) return;
  let now: Adding = { total: files.length, done: 0, added: 0, errors: [] };
  adding.set(now);
  if (!files.length) return;
  try {
    const path = collectionPath(COLLECTION);
    await askJson(path, { method: "PUT", json: {} });
    for (const batch of batchesOf(files, info.limits)) {
      const { results, errors } = await addBatch(`${path}/items`, batch);
      now = {
        ...now,
        done: now.done + batch.length,
        added: now.added + results.length,
        errors: [...now.errors, ...errors.map(({ index, detail }) => `${batch[index]!.id}: ${detail}`)],
      };
      adding.set(now);
    }
  } catch (error) {
    adding.set({ ...now, done: now.total, errors: [...now.errors, (error as Error).message] });
  }
  connection.refresh(); // the collection is new to the other views
  if (now.added) go(href(["map"], { collection: COLLECTION }));
}

/** Adds the files of one request. Files that are too large for one are errors, like any other. */
async function addBatch(path: string, batch: NamedFile[]): Promise<Outcomes> {
  const form = new FormData();
  for (const { file } of batch) form.append("files", file);
  form.append("items", JSON.stringify(batch.map(({ id }) => ({ id }))));
  try {
    return await askJson<Outcomes>(path, { body: form });
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== TOO_LARGE) throw error;
    return { results: [], errors: batch.map((_, index) => ({ index, detail: error.message })) };
  }
}

const isAdding = (now: Adding | null) => now !== null && now.done < now.total;

function* batchesOf(files: NamedFile[], limits: Record<string, number>): Generator<NamedFile[]> {
  const mostImages = Math.min(MOST_TOGETHER, limits.max_images ?? MOST_TOGETHER);
  const mostBytes = (limits.max_body_bytes ?? Infinity) / 2; // the rest is for the form around them
  let batch: NamedFile[] = [];
  let bytes = 0;
  for (const named of files) {
    if (batch.length && (batch.length === mostImages || bytes + named.file.size > mostBytes)) {
      yield batch;
      [batch, bytes] = [[], 0];
    }
    batch.push(named);
    bytes += named.file.size;
  }
  yield batch;
}

/** Where pictures can be dropped, and those of late that could not be added. */
export function DropZone({ session }: { session: Session }) {
  const now = useStore(adding);
  if (!takesPictures(session)) return null;
  const choose = (event: TargetedEvent<HTMLInputElement>) => {
    const files = [...(event.currentTarget.files ?? [])];
    void addPictures(
      files.map((file) => ({ id: file.webkitRelativePath || file.name, file })),
      session,
    );
    event.currentTarget.value = "";
  };
  return (
    <div class="drop-zone">
      <p>
        <strong>Drop a folder of pictures here</strong>, or choose some, to search them
        {session.info.texts ? " by words" : " by pictures"}. Only small copies are kept.
      </p>
      <label class="button drop">
        <input type="file" class="unseen" accept="image/*" multiple disabled={isAdding(now)} onChange={choose} />
        Choose pictures
      </label>
      {now && <Added now={now} />}
    </div>
  );
}

/** How far the pictures are, and those that cannot be used. */
function Added({ now }: { now: Adding }) {
  return (
    <div class="added">
      {now.total === 0 && <p role="alert">What was dropped holds no files.</p>}
      {isAdding(now) && (
        <>
          <p role="status">
            Adding pictures: {count(now.done)} of {count(now.total)}
          </p>
          <progress max={now.total} value={now.done} aria-label="Adding pictures" />
        </>
      )}
      {now.errors.length > 0 && (
        <details open={!now.added}>
          <summary>{counted(now.errors.length, "file")} not added</summary>
          <ul>
            {now.errors.map((error) => (
              <li key={error}>{error}</li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}
