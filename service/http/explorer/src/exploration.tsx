// The exploration of a place, where the server makes one: its progress, and the number of clusters.

import { useEffect, useRef, useState } from "preact/hooks";

import { askJson } from "./api";
import { connection } from "./connection";
import { Field } from "./parts";
import { PictureLink, useSequence } from "./picture";
import { store, useStore } from "./store";
import { count, counted, duration } from "./text";
import { Thumbnail } from "./thumbnails";
import type { Exploration, Item } from "./wire";

const AGAIN_MS = 400;
const STAGES: Record<Exploration["stage"], string> = {
  list: "Looking for pictures…",
  embed: "Looking at the pictures…",
  cluster: "Clustering them…",
  name: "Naming the clusters…",
  label: "Assigning the pictures to clusters…",
  done: "",
  failed: "That did not work",
};
const MOST_SHOWN = 240;

/** Null until it is known whether there is one, and where there is none. */
const exploration = store<Exploration | null>(null);
const pictures = store<Item[]>([]);

export const isOver = ({ stage }: Exploration) => stage === "done" || stage === "failed";

/** Follows the exploration of this server, and lets everything be loaded again when it has changed. */
export function useExploration(): Exploration | null {
  const now = useStore(exploration);
  const epoch = useStore(connection.epoch);
  const over = now !== null && isOver(now);
  useEffect(() => {
    if (over) return;
    const gone = new AbortController();
    void follow(gone.signal);
    return () => gone.abort();
  }, [epoch, over]);
  return now;
}

async function follow(signal: AbortSignal): Promise<void> {
  for (;;) {
    try {
      const now = await askJson<Exploration | null>("v1/exploration", { signal });
      if (now === null) return;
      take(now);
    } catch {
      return; // once the server is back, or a key is there, it is asked anew
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    const now = exploration.get();
    if (signal.aborted || (now && isOver(now))) return;
  }
}

function take(now: Exploration): void {
  const before = exploration.get();
  const known = new Set(pictures.get().map(({ id }) => id));
  const news = now.newest.filter(({ id }) => !known.has(id));
  if (news.length) pictures.set([...pictures.get(), ...news].slice(-MOST_SHOWN));
  exploration.set(now);
  // what other views show of the server has changed with the stage
  if (before && before.stage !== now.stage) connection.refresh();
}

/** What goes on, above the wall; nothing once all is made. */
export function Progress({ now }: { now: Exploration }) {
  if (now.stage === "done") return null;
  if (now.stage === "failed")
    return (
      <div class="failure" role="alert">
        <h2>{STAGES.failed}</h2>
        <p>{now.error}</p>
      </div>
    );
  return (
    <div class="making" role="status">
      <p>
        <strong>{STAGES[now.stage]}</strong>{" "}
        {now.total !== null && now.total > 0 && (
          <span>
            {count(now.done)} of {count(now.total)}
          </span>
        )}
        {now.seconds_left !== null && now.seconds_left >= 2 && (
          <span class="soft"> · about {duration(now.seconds_left)} left</span>
        )}
      </p>
      {now.total ? <progress max={now.total} value={now.done} aria-label={STAGES[now.stage]} /> : <progress aria-label={STAGES[now.stage]} />}
    </div>
  );
}

/** The pictures that are embedded, until there are clusters. */
export function Arriving({ now }: { now: Exploration }) {
  const shown = useStore(pictures);
  useSequence(shown);
  return (
    <ul class="tiles arriving" aria-label="Pictures">
      {shown.map((item) => (
        <li key={item.id} class="tile">
          <PictureLink item={item} title={item.id}>
            <Thumbnail collection={now.collection} item={item} />
          </PictureLink>
        </li>
      ))}
    </ul>
  );
}

/** The number of clusters, and a way to ask for another. */
export function ClusterNumber({ now }: { now: Exploration }) {
  const [wrong, setWrong] = useState("");
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (field.current && now.clusters) field.current.value = String(now.clusters);
  }, [now.clusters]);
  if (now.clusters === null) return null;
  const again = async (clusters: number | null) => {
    try {
      setWrong("");
      exploration.set(await askJson<Exploration>("v1/exploration", { json: { clusters } }));
      exploration.set({ ...exploration.get()!, stage: "cluster", total: null });
    } catch (error) {
      setWrong((error as Error).message);
    }
  };
  const busy = !isOver(now);
  return (
    <form
      class="cluster-number"
      title={now.considered.length ? `Chosen from ${now.considered.join(", ")}` : undefined}
      onSubmit={(event) => {
        event.preventDefault();
        void again(Number(field.current!.value));
      }}
    >
      <Field label="Clusters">
        {(id) => <input id={id} ref={field} type="number" class="short" min={1} max={now.pictures} required disabled={busy} />}
      </Field>
      <button disabled={busy}>Cluster again</button>
      <span role="alert" class="wrong">
        {wrong}
      </span>
    </form>
  );
}

export function Skipped({ now }: { now: Exploration }) {
  if (!now.skipped) return null;
  return <a href="#/skipped">{counted(now.skipped, "file")} skipped</a>;
}
