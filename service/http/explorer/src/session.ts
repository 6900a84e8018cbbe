// What the whole page knows: the served model, its collections and which one is looked at.

import { askJson } from "./api";
import { useLoaded, type Loaded } from "./loaded";
import { useRoute } from "./route";
import type { Collection, Info } from "./wire";

export interface Session {
  info: Info;
  collections: Collection[];
  collection: Collection | null;
}

export function useSession(): Loaded<Session> {
  const named = useRoute().params.get("collection");
  const loaded = useLoaded(async (signal) => {
    const [info, { collections }] = await Promise.all([
      askJson<Info>("v1/info", { signal }),
      askJson<{ collections: Collection[] }>("v1/collections", { signal }),
    ]);
    return { info, collections: collections.filter((one) => one.usable) };
  }, []);
  if (!loaded.value) return { ...loaded, value: null };
  const { info, collections } = loaded.value;
  const largest = collections.reduce<Collection | null>(
    (best, one) => (best && best.items >= one.items ? best : one),
    null,
  );
  const collection = named ? (collections.find((one) => one.name === named) ?? null) : largest;
  return { ...loaded, value: { info, collections, collection } };
}
