// Search by a picture, by words, or by an item; "less like this" moves the query away.

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { TargetedEvent, TargetedSubmitEvent } from "preact";

import { DropZone } from "../adding";
import { askJson, collectionPath, query } from "../api";
import type { View } from "../app";
import { conditionsIn, filterOf, Filters } from "../filters";
import { useFloor } from "../floor";
import { useLoaded, type Loaded } from "../loaded";
import { polygonIn, type Polygon } from "../map/plane";
import { Empty, EmptyServer, Failure, Fold, Heading, Once, Tiles } from "../parts";
import { NOTHING_ELSE, pictureOf, reading, searchBy, unpacked } from "../pictures";
import { Facts, PictureLink } from "../picture";
import { changed, go, href, useRoute } from "../route";
import type { Session } from "../session";
import { useStore } from "../store";
import { count, counted, fileName, similarity } from "../text";
import { Thumbnail } from "../thumbnails";
import type { CenterPage, Collection, Found, Item, Labeled, Selection } from "../wire";
import { LabelStrip } from "./cluster";

const FIRST = 60;
const MOST = 600;
const MOST_IDS = 10_000;
const EXAMPLES = 5;
const FEW = 5; // pictures, below which other words are proposed
const STARTER = "starter";
const STRONGER = "hub:google/siglip2-base-patch16-224";

/** What is searched for: exactly one of them. */
interface Query {
  text: string | null;
  like: string | null;
  vector: string | null;
}

export function Search({ session }: View) {
  const { params } = useRoute();
  const { collection } = session;
  const asked = {
    text: params.get("text"),
    like: params.get("like"),
    vector: params.get("vector"),
  };
  const lasso = params.get("lasso");
  const polygon = useMemo(() => polygonIn(lasso), [lasso]);
  const selected = useSelected(collection?.name, polygon);
  const given = asked.text !== null || asked.like !== null || asked.vector !== null;
  return (
    <>
      <div class="bar-of-tools">
        <Heading>Search</Heading>
      </div>
      <Ask session={session} text={asked.text ?? ""} />
      {!collection ? (
        <EmptyServer title="There is no collection to search" session={session} />
      ) : given ? (
        <Answer {...{ asked, collection, session, polygon, selected }} />
      ) : (
        <>
          <div class="query">
            <Among collection={collection} selected={selected} lasso={lasso} />
            <Fold title="Filter" class="tools">
              <Filters collection={collection} conditions={conditionsIn(params)} />
            </Fold>
          </div>
          <Empty title="What are you looking for?">
            <p>
              Drop or paste a picture anywhere on this page, or choose one
              {session.info.texts ? ", or type words." : "."} Each picture leads to what is like it.
            </p>
            {session.info.texts && session.info.centers && <Examples collection={collection} />}
            {!session.info.texts && <p class="soft">The served model, {session.info.model}, does not read words.</p>}
            {session.info.model === STARTER && <StrongerWords />}
            <DropZone session={session} />
          </Empty>
        </>
      )}
    </>
  );
}

/** Words that find something here: names of the largest clusters. */
function Examples({ collection }: { collection: Collection }) {
  const asked = query({ collection: collection.name, sort: "members", descending: true, limit: 60 });
  const { value } = useLoaded((signal) => askJson<CenterPage>(`v1/centers${asked}`, { signal }), [asked]);
  const names = new Set(value?.centers.flatMap(({ name }) => name ?? []));
  if (!names.size) return null;
  return (
    <p class="examples">
      For example:
      {[...names].slice(0, EXAMPLES).map((name) => (
        <a key={name} href={changed({ ...NOTHING_ELSE, text: name })}>
          {name}
        </a>
      ))}
    </p>
  );
}

/** What reads words better than the starter, and what that costs. */
function StrongerWords() {
  return (
    <p class="small hint">
      The starter knows things, not scenes, colors or actions. With a network and the extras <code>train</code> and{" "}
      <code>hub</code>, <code>--model {STRONGER}</code> reads words far better. It costs a download of 1.5 GB, and about
      thirty times as long for each picture.
    </p>
  );
}

function Ask({ session, text }: { session: Session; text: string }) {
  const progress = useStore(reading);
  const collection = session.collection?.name;
  const words = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => void (words.current && (words.current.value = text)), [text]);
  const choose = (event: TargetedEvent<HTMLInputElement>) => {
    const file = event.currentTarget.files?.[0];
    if (file) void searchBy(file, file.name, collection);
    event.currentTarget.value = "";
  };
  const type = (event: TargetedSubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    const typed = String(new FormData(event.currentTarget).get("text")).trim();
    if (typed) go(changed({ ...NOTHING_ELSE, text: typed }));
  };
  return (
    <div class="ask">
      {session.info.texts && (
        <form role="search" onSubmit={type}>
          <input ref={words} type="search" name="text" aria-label="Words" aria-keyshortcuts="/" />
          <button>Search</button>
        </form>
      )}
      <label class="button drop">
        <input type="file" class="unseen" accept="image/*" onChange={choose} />
        Choose a picture
      </label>
      <span class="soft">or drop or paste one</span>
      <p role="status" class="soft">
        {progress && !progress.error && `Reading ${progress.name}…`}
      </p>
      {progress?.error && (
        <p role="alert" class="wrong">
          {progress.error.message}
        </p>
      )}
    </div>
  );
}

interface Asked {
  asked: Query;
  collection: Collection;
  session: Session;
  polygon: Polygon | null;
  selected: Loaded<Selection>;
}

function Answer({ asked, collection, session, polygon, selected }: Asked) {
  const { params } = useRoute();
  const without = params.getAll("without");
  const conditions = conditionsIn(params);
  const top = Math.min(MOST, Number(params.get("top")) || FIRST);
  const ids = selected.value?.items.map((item) => item.id) ?? null;
  const vector = asked.vector === null ? null : unpacked(asked.vector);
  const ready = !polygon || ids !== null;
  const found = useLoaded(
    ready
      ? (signal) =>
          askJson<Found>(`${collectionPath(collection.name)}/search`, {
            signal,
            json: {
              ...bodyOf(asked, vector),
              top: asked.like === null ? top : Math.min(MOST, top + 1),
              filter: filterOf(conditions, ids) ?? undefined,
              without: without.length ? { ids: without } : undefined,
            },
          })
      : null,
    [collection.name, asked, without, conditions, polygon, top],
    { keep: true },
  );
  const floor = useFloor(session.info, collection, asked.text !== null && !without.length);
  if (asked.vector !== null && !vector) return <Empty title="This address holds no picture" />;
  return (
    <>
      <section class="query" aria-label="The query">
        <QueryPanel asked={asked} collection={collection} />
        {without.map((id) => (
          <span class="chip" key={id}>
            <span>
              less like <bdi>{fileName(id)}</bdi>
            </span>
            <button
              type="button"
              aria-label={`No longer less like ${fileName(id)}`}
              onClick={() => go(changed({ without: without.filter((other) => other !== id) }))}
            >
              ×
            </button>
          </span>
        ))}
        <Among collection={collection} selected={selected} lasso={params.get("lasso")} />
      </section>
      <div class="with-side">
        {session.info.centers ? (
          <Fold title="Its clusters" class="side">
            <Labels asked={asked} vector={vector} collection={collection} />
          </Fold>
        ) : (
          <div class="side" />
        )}
        <section aria-labelledby="found">
          <div class="bar-of-tools">
            <h2 id="found">Most similar</h2>
            <Fold title="Filter" class="tools">
              <Filters collection={collection} conditions={conditions} />
            </Fold>
          </div>
          {selected.error && <Failure error={selected.error} again={selected.again} />}
          <Once loaded={found}>
            {(answer) => <Matches {...{ answer, asked, collection, top, without, floor }} model={session.info.model} />}
          </Once>
        </section>
      </div>
    </>
  );
}

/** The selection on the map that is searched in. */
function Among({ collection, selected, lasso }: { collection: Collection; selected: Loaded<Selection>; lasso: string | null }) {
  if (!lasso) return null;
  return (
    <span class="chip">
      <a href={href(["map"], { collection: collection.name, lasso })}>
        among {selected.value ? counted(selected.value.total, "picture") : "pictures"} selected on the map
      </a>
      <button type="button" aria-label="Search everywhere" onClick={() => go(changed({ lasso: null }))}>
        ×
      </button>
    </span>
  );
}

function useSelected(collection: string | undefined, polygon: Polygon | null): Loaded<Selection> {
  return useLoaded(
    collection === undefined || !polygon
      ? null
      : (signal) => {
          const json = { polygon, limit: MOST_IDS };
          return askJson<Selection>(`${collectionPath(collection)}/layout/items`, { signal, json });
        },
    [collection, polygon],
  );
}

function bodyOf(asked: Query, vector: number[] | null): Record<string, unknown> {
  if (asked.text !== null) return { texts: [asked.text] };
  if (asked.like !== null) return { ids: [asked.like] };
  return { embeddings: [vector] };
}

function QueryPanel({ asked, collection }: { asked: Query; collection: Collection }) {
  if (asked.like !== null) return <LikeItem id={asked.like} collection={collection} />;
  if (asked.text !== null)
    return (
      <p class="words">
        “<bdi>{asked.text}</bdi>”
      </p>
    );
  const picture = pictureOf(asked.vector!);
  return picture ? (
    <img class="given" src={picture} alt="The picture that is searched for" />
  ) : (
    <p class="soft">A picture that is no longer in this page’s memory.</p>
  );
}

function LikeItem({ id, collection }: { id: string; collection: Collection }) {
  const item = useLoaded(
    (signal) => askJson<Item>(`${collectionPath(collection.name)}/items/${encodeURIComponent(id)}`, { signal }),
    [collection.name, id],
  );
  return (
    <Once loaded={item}>
      {(described) => (
        <div class="item">
          <PictureLink item={described}>
            <Thumbnail collection={collection.name} item={described} />
          </PictureLink>
          <div>
            <h2>
              <bdi>{id}</bdi>
            </h2>
            <Facts metadata={described.metadata ?? {}} />
          </div>
        </div>
      )}
    </Once>
  );
}

interface Answered {
  answer: Found;
  asked: Query;
  collection: Collection;
  top: number;
  without: string[];
  /** What is less similar is a weak match; null: nothing is. */
  floor: number | null;
  model: string;
}

function Matches({ answer, asked, collection, top, without, floor, model }: Answered) {
  const refused = answer.errors[0];
  if (refused) return <Failure error={new Error(refused.detail)} />;
  const matches = (answer.results[0]?.matches ?? []).filter((match) => match.id !== asked.like).slice(0, top);
  const like = (id: string) => changed({ ...NOTHING_ELSE, like: id });
  const strong = matches.filter((match) => floor === null || (match.similarity ?? 1) >= floor);
  const weak = matches.slice(strong.length);
  const tiles = (items: Item[], label: string) => (
    <Tiles
      collection={collection.name}
      items={items}
      label={label}
      actions={({ id }) => (
        <>
          <a href={like(id)} aria-label={`More like ${fileName(id)}`}>
            more
          </a>
          <button
            type="button"
            aria-label={`Less like ${fileName(id)}`}
            disabled={without.includes(id)}
            onClick={() => go(changed({ without: [...without, id] }))}
          >
            less
          </button>
        </>
      )}
    />
  );
  return (
    <>
      <p class="soft" role="status">
        {counted(strong.length, "picture")} of {counted(answer.matching, "item")}
        {answer.exact ? "" : ", by the index"}
      </p>
      {!matches.length && (
        <Empty title="Nothing is left to compare with">
          <p>
            <a href={changed({ where: null, lasso: null })}>Search without filters</a>
          </p>
        </Empty>
      )}
      {strong.length > 0 && tiles(strong, "Results")}
      {weak.length > 0 && (
        <>
          {!strong.length && (
            <Empty title="No picture matches these words well">
              {model === STARTER && <StrongerWords />}
            </Empty>
          )}
          {strong.length > 0 && strong.length < FEW && (
            <p class="soft">
              Few pictures match surely: try a broader word{model === STARTER && ", in English"}, or look at the weak matches.
            </p>
          )}
          <details class="weak">
            <summary>
              {count(weak.length)} weak {weak.length === 1 ? "match" : "matches"}
            </summary>
            <p class="soft small">
              Less similar than {similarity(floor!)}, which pictures here reach by chance with words that mean nothing.
            </p>
            {tiles(weak, "Weak matches")}
          </details>
        </>
      )}
      {!weak.length && matches.length >= top && top < MOST && (
        <p class="more">
          <button type="button" onClick={() => go(changed({ top: Math.min(MOST, top * 2) }), { replace: true })}>
            Show more
          </button>
        </p>
      )}
    </>
  );
}

/** The clusters of the query. */
function Labels({ asked, vector, collection }: { asked: Query; vector: number[] | null; collection: Collection }) {
  const labeled = useLoaded(
    async (signal) => {
      const embeddings = asked.like === null ? null : [await embeddingOf(asked.like, collection, signal)];
      const json = embeddings ? { embeddings } : bodyOf(asked, vector);
      return askJson<Labeled>(`v1/labels${query({ top: 8 })}`, { json, signal });
    },
    [asked, collection.name],
  );
  return (
    <section aria-labelledby="labels">
      <h2 id="labels">Its clusters</h2>
      <Once loaded={labeled}>
        {({ results }) => <LabelStrip labels={results[0]?.labels ?? []} collection={collection.name} />}
      </Once>
    </section>
  );
}

async function embeddingOf(id: string, collection: Collection, signal: AbortSignal): Promise<number[]> {
  const path = `${collectionPath(collection.name)}/items/${encodeURIComponent(id)}?embedding=true`;
  return (await askJson<{ embedding: number[] }>(path, { signal })).embedding;
}
