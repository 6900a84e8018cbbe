// How similar pictures are to words that mean nothing: what is less similar to a query than that
// is a weak match. Models differ in it by far, so it is measured on the collection at hand.

import { askJson, collectionPath } from "./api";
import { useLoaded } from "./loaded";
import type { Collection, Found, Info } from "./wire";

const MEANINGLESS =
  "lsgqejeyd vkprdl ktugrpoqi zracxm gshhze occkqpdjrj drkrgztrsjo tzmksh fgfbtvip cvyeeb wrvmwq qzhgvsns opvuwzlc tdpsukgh xidwhl knbdzew bsurtvc dugtsd cldbtagfw pgxzbv rntdic ynbiqpmzj zirwztejdx zvuatpkhxkw mvqhtoe jfuxlrwz hqykdap eojwtgm bxnfuri kzpylvsd uwhgcmqt ioxrkbf".split(" ");
const QUANTILE = 0.75;

const known = new Map<string, number>();

/** The least similarity of a match that is not weak; null until it is known. */
export function useFloor(info: Info, collection: Collection, wanted: boolean): number | null {
  const subject = [info.fingerprint, collection.name, collection.items].join();
  const measure = async (signal: AbortSignal) => {
    const path = `${collectionPath(collection.name)}/search`;
    const json = { texts: MEANINGLESS, top: 1, metadata: false };
    const { results } = await askJson<Found>(path, { json, signal });
    const best = results.flatMap(({ matches }) => matches[0]?.similarity ?? []).sort((a, b) => a - b);
    const floor = best[Math.floor(QUANTILE * best.length)] ?? -1;
    known.set(subject, floor);
    return floor;
  };
  const measured = useLoaded(wanted && !known.has(subject) ? measure : null, [subject]);
  return wanted ? (known.get(subject) ?? measured.value) : null;
}
