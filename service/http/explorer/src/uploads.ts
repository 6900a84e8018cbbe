// Files of this computer, uploaded in parts, and files of the server, downloaded.

import { address, ask, askJson, key } from "./api";
import { store } from "./store";

const PART_BYTES = 8 * 2 ** 20; // a part must arrive within the deadline of one request

/** The archive that was dropped on the page or chosen, for the form that submits a job. */
export const archive = store<File | null>(null);

/** The archive of pictures in a drop. */
export const archiveIn = (data: DataTransfer | null) =>
  [...(data?.files ?? [])].find(({ name }) => /\.(zip|tar|parquet)$/i.test(name));

/** Uploads images, and returns the id of the file. onProgress: gets the uploaded share, 0 to 1. */
export async function upload(file: File, onProgress: (share: number) => void): Promise<string> {
  const begun = { filename: file.name, purpose: "images", bytes: file.size };
  const { id } = await askJson<{ id: string }>("v1/uploads", { json: begun });
  const path = `v1/uploads/${encodeURIComponent(id)}`;
  const part_ids: string[] = [];
  for (let start = 0; start < file.size; start += PART_BYTES) {
    const body = new FormData();
    body.set("data", file.slice(start, start + PART_BYTES), "part");
    part_ids.push((await askJson<{ id: string }>(`${path}/parts`, { body })).id);
    onProgress(Math.min(1, (start + PART_BYTES) / file.size));
  }
  const done = await askJson<{ file: { id: string } }>(`${path}/complete`, { json: { part_ids } });
  return done.file.id;
}

/** Saves a file of the server. A browser sends no key with a link, so with one it is fetched first. */
export async function download(id: string) {
  const path = `v1/files/${encodeURIComponent(id)}`;
  const link = document.createElement("a");
  if (!key.get()) {
    link.href = address(`${path}/content`);
    link.click();
    return;
  }
  const { filename } = await askJson<{ filename: string }>(path);
  link.href = URL.createObjectURL(await (await ask(`${path}/content`)).blob());
  link.download = filename;
  link.click();
  URL.revokeObjectURL(link.href);
}
