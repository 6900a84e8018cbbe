// The frame around every view: where one is, which collection, whether the server is there.

import type { JSX, TargetedSubmitEvent } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { addPictures, filesIn, takesPictures } from "./adding";
import { ask, key, locked } from "./api";
import { connection } from "./connection";
import { useExploration } from "./exploration";
import { Failure, Field, Heading, Loading } from "./parts";
import { PictureView } from "./picture";
import { pictureIn, searchBy } from "./pictures";
import { changed, go, href, route, useRoute } from "./route";
import { useSession, type Session } from "./session";
import { useStore } from "./store";
import { count } from "./text";
import { archive, archiveIn } from "./uploads";
import { Cluster } from "./views/cluster";
import { Clusters } from "./views/clusters";
import { Duplicates } from "./views/duplicates";
import { JobView } from "./views/job";
import { Jobs } from "./views/jobs";
import { MapView } from "./views/map";
import { Search } from "./views/search";
import { Skipped } from "./views/skipped";
import { Usage } from "./views/usage";
import type { Exploration } from "./wire";

export interface View {
  session: Session;
  /** That of this server; null where it makes none. */
  exploration?: Exploration | null;
}

const VIEWS: Record<string, { title: string; show: (given: View & { part?: string }) => JSX.Element }> = {
  clusters: { title: "Clusters", show: (given) => (given.part ? <Cluster id={given.part} {...given} /> : <Clusters {...given} />) },
  search: { title: "Search", show: (given) => <Search {...given} /> },
  map: { title: "Map", show: (given) => <MapView {...given} /> },
  duplicates: { title: "Duplicates", show: (given) => <Duplicates {...given} /> },
  skipped: { title: "", show: () => <Skipped /> },
  jobs: { title: "Jobs", show: (given) => (given.part ? <JobView id={given.part} /> : <Jobs />) },
  usage: { title: "Usage", show: () => <Usage /> },
};

/** The parameters with which a view is about something else. */
const SUBJECTS = ["like", "vector"];

export function App() {
  const { path, params } = useRoute();
  const session = useSession();
  const [name = "clusters", part] = path;
  const view = VIEWS[name];
  const exploration = useExploration();
  const picture = params.get("picture");
  useFocus([...path, ...SUBJECTS.map((name) => params.get(name))].join("/"));
  useGivenPictures(session.value);
  useSlash();
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={href(["clusters"], kept())}>
          <Mark />
          mlcd
        </a>
        <nav aria-label="Views">
          {Object.entries(VIEWS).filter(([, { title }]) => title).map(([known, { title }]) => (
            <a
              key={known}
              href={href([known], kept())}
              aria-current={known === name ? "page" : undefined}
              aria-keyshortcuts={known === "search" ? "/" : undefined}
            >
              {title}
            </a>
          ))}
        </nav>
        <div class="place">
          {session.value && <Chooser session={session.value} />}
          <KeyEntry />
        </div>
      </header>
      <ServerGone />
      <main id="main">
        {view === undefined ? (
          <>
            <Heading>There is no such page</Heading>
            <p>
              <a href={href(["clusters"])}>See the clusters</a>
            </p>
          </>
        ) : session.value ? (
          <view.show session={session.value} exploration={exploration} part={part} key={`${name}/${part ?? ""}`} />
        ) : (
          <>
            <Heading>{view.title}</Heading>
            {session.error ? <Failure error={session.error} again={session.again} /> : <Loading />}
          </>
        )}
      </main>
      {session.value && picture !== null && <PictureView id={picture} session={session.value} exploration={exploration} />}
    </>
  );
}

/** Links to other views keep the collection. */
function kept() {
  return { collection: route().params.get("collection") };
}

function skip(event: Event): void {
  event.preventDefault(); // the part behind # is the page's own
  document.getElementById("main")!.querySelector<HTMLElement>("h1")?.focus();
}

/** What is new begins at its heading, for eyes and for readers of screens. */
function useFocus(subject: string): void {
  const before = useRef(subject);
  // With the paint, not after it: a later focus would take it from whoever types by then.
  useLayoutEffect(() => {
    if (before.current === subject) return;
    before.current = subject;
    scrollTo(0, 0);
    focusOn(typing ? WORDS : "main h1");
    typing = false;
  }, [subject]);
}

const WORDS = ".ask input";
/** Whether the view that opens is for typing into. */
let typing = false;
const focusOn = (selector: string) => document.querySelector<HTMLElement>(selector)?.focus({ preventScroll: true });

/** A slash leads to the words to search for. */
function useSlash(): void {
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const elsewhere = (event.target as HTMLElement).closest("input, select, textarea, dialog");
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || elsewhere) return;
      event.preventDefault();
      if (document.querySelector(WORDS)) focusOn(WORDS);
      else {
        typing = true;
        go(href(["search"], kept()));
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

/** A picture that is dropped or pasted anywhere is searched for; several are added, where they can be. An archive
 *  becomes a job. */
function useGivenPictures(session: Session | null): void {
  const collection = session?.collection?.name;
  const takes = session !== null && takesPictures(session);
  useEffect(() => {
    if (!session) return;
    const gone = new AbortController();
    const search = (picture: File) => {
      go(href(["search"], { collection })); // where its progress is seen
      void searchBy(picture, picture.name, collection);
    };
    const over = (event: DragEvent) => {
      event.preventDefault();
      document.body.classList.add("dropping");
    };
    const left = () => document.body.classList.remove("dropping");
    const { signal } = gone;
    addEventListener("dragover", over, { signal });
    addEventListener("dragleave", (event) => event.relatedTarget ?? left(), { signal });
    const drop = async (event: DragEvent) => {
      event.preventDefault();
      left();
      const packed = archiveIn(event.dataTransfer);
      if (packed) {
        archive.set(packed);
        return go(href(["jobs"]));
      }
      const picture = pictureIn(event.dataTransfer);
      if (!event.dataTransfer || !takes) return picture && search(picture);
      const files = await filesIn(event.dataTransfer);
      if (collection && picture && files.length === 1) search(picture);
      else void addPictures(files, session);
    };
    const paste = (event: ClipboardEvent) => {
      const picture = pictureIn(event.clipboardData);
      if (!picture) return;
      event.preventDefault();
      search(picture);
    };
    addEventListener("drop", (event) => void drop(event), { signal });
    addEventListener("paste", paste, { signal });
    return () => gone.abort();
  }, [session !== null, collection, takes]);
}

function Mark() {
  return (
    <svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true">
      <circle cx="5" cy="5" r="2.6" />
      <circle cx="12" cy="6" r="1.8" />
      <circle cx="5.5" cy="12" r="1.8" />
      <circle cx="12" cy="12" r="2.6" />
    </svg>
  );
}

function Chooser({ session }: View) {
  const { collections, collection, info } = session;
  if (!collections.length) return <span class="soft">{info.model}: no collections</span>;
  return (
    <Field label="Collection">
      {(id) => (
        <select
          id={id}
          value={collection?.name ?? ""}
          onChange={(event) => go(changedCollection(event.currentTarget.value))}
        >
          {!collection && <option value="">choose</option>}
          {collections.map(({ name, items }) => (
            <option key={name} value={name}>
              {name} ({count(items)})
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

/** Of another collection the same view, without what was chosen in this one. */
function changedCollection(collection: string): string {
  const { path } = route();
  return path[0] === "jobs" ? changed({ collection }) : href(path, { collection });
}

function KeyEntry() {
  const known = useStore(key);
  const needed = useStore(locked);
  const [wrong, setWrong] = useState("");
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), [needed]);
  if (!needed && !known) return null;
  if (!needed)
    return (
      <button type="button" class="quiet" onClick={() => (key.set(""), connection.refresh())}>
        Forget the key
      </button>
    );
  const enter = async (event: TargetedSubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    const given = String(new FormData(event.currentTarget).get("key")).trim();
    try {
      key.set(given);
      await ask("v1/info");
      locked.set(false);
      setWrong("");
      connection.refresh();
    } catch (error) {
      key.set("");
      setWrong((error as Error).message);
    }
  };
  return (
    <form class="key" onSubmit={enter}>
      <Field label="API key">
        {(id) => (
          <input
            id={id}
            ref={field}
            name="key"
            type="password"
            autocomplete="off"
            required
            aria-invalid={wrong !== ""}
            aria-describedby="key-wrong"
          />
        )}
      </Field>
      <button>Enter</button>
      <span id="key-wrong" class="wrong" role="alert">
        {wrong}
      </span>
    </form>
  );
}

/** While the server is gone, says so and when it is asked again. */
function ServerGone() {
  const gone = useStore(connection.gone);
  const [, tick] = useState(0);
  useEffect(() => {
    if (!gone) return;
    const timer = setInterval(() => tick((ticks) => ticks + 1), 500);
    return () => clearInterval(timer);
  }, [gone]);
  if (!gone) return null;
  const seconds = Math.max(0, Math.ceil((gone.next - Date.now()) / 1000));
  return (
    <div class="banner" role="status">
      <strong>The server does not answer.</strong>{" "}
      <span aria-hidden="true">{seconds ? `The page asks again in ${seconds} s.` : "The page asks again…"}</span>
      <button type="button" onClick={connection.tryNow}>
        Ask now
      </button>
    </div>
  );
}
