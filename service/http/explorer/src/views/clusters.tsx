// The wall: every cluster with the pictures nearest to its center.

import { askJson, query } from "../api";
import type { View } from "../app";
import { Arriving, ClusterNumber, Progress, Skipped } from "../exploration";
import { usePages } from "../loaded";
import { Empty, EmptyServer, Failure, Field, Fold, Heading, Loading, MissingPictures, More } from "../parts";
import { changed, go, href, useRoute } from "../route";
import { belongs, clusterName, count, counted, percent } from "../text";
import { Mosaic } from "../thumbnails";
import type { Center, CenterPage, Recent } from "../wire";

const PAGE = 60;
const UNUSUAL = 0.2; // of queries; 5 % of those like the members lie beyond
const SORTS = {
  members: "Pictures",
  size: "Size in training",
  name: "Name",
  spread: "Spread",
  novelty: "Novelty",
  recent: "Recent novelty",
  id: "Number",
};

/** What is known of the members of a collection alone. */
const OF_COLLECTIONS = ["members", "spread", "novelty"];

export function Clusters({ session, exploration }: View) {
  const { params } = useRoute();
  const { collection, info } = session;
  const sort = params.get("sort") ?? (collection ? "members" : "size");
  const sorts = Object.entries(SORTS).filter(([name]) => collection || !OF_COLLECTIONS.includes(name));
  const words = params.get("query") ?? "";
  const smallest = params.get("min_size") ?? "";
  const rising = params.get("rising") ?? (sort === "name" || sort === "id" ? "yes" : "no");
  const asked = {
    collection: collection?.name,
    sort,
    descending: rising === "no",
    query: words || null,
    min_size: smallest || null,
    examples: 6,
    limit: PAGE,
  };
  const paged = usePages(
    info.centers &&
      (async (cursor, signal) => {
        const page = await askJson<CenterPage>(`v1/centers${query({ ...asked, cursor })}`, { signal });
        return { rows: page.centers, next: page.next, total: page.total, recent: page.recent };
      }),
    [asked],
  );
  if (!info.centers && exploration && exploration.stage !== "failed")
    return (
      <>
        <Heading>Your pictures</Heading>
        <Progress now={exploration} />
        <Arriving now={exploration} />
      </>
    );
  if (!info.centers)
    return (
      <>
        <Heading>Clusters</Heading>
        {exploration && <Progress now={exploration} />}
        <EmptyServer title="This server has no clusters" session={session}>
          {collection && (
            <p>
              Until then: <a href={href(["search"], { collection: collection.name })}>search the pictures</a> or{" "}
              <a href={href(["map"], { collection: collection.name })}>see their map</a>.
            </p>
          )}
        </EmptyServer>
      </>
    );
  return (
    <>
      <div class="bar-of-tools">
        <Heading>Clusters</Heading>
        <p class="soft" role="status">
          {paged.total !== null && counted(paged.total, "cluster")}
          {collection && ` · ${counted(collection.items, "picture")}`}
          {paged.first?.recent && <Queries recent={paged.first.recent} />}
          {exploration && exploration.skipped > 0 && (
            <>
              {" · "}
              <Skipped now={exploration} />
            </>
          )}
        </p>
        <Fold title="Sort and filter" class="tools">
          {exploration && <ClusterNumber now={exploration} />}
          <Field label="Name">
            {(id) => (
              <input
                id={id}
                type="search"
                size={14}
                maxLength={500}
                title="Words of the name or of an alternate"
                value={words}
                onInput={(event) => go(changed({ query: event.currentTarget.value }), { replace: true })}
              />
            )}
          </Field>
          <Field label="At least">
            {(id) => (
              <input
                id={id}
                type="number"
                min={0}
                class="short"
                value={smallest}
                onInput={(event) => go(changed({ min_size: event.currentTarget.value }), { replace: true })}
              />
            )}
          </Field>
          <Field label="Sort by">
            {(id) => (
              <select
                id={id}
                value={sort}
                onChange={(event) => go(changed({ sort: event.currentTarget.value, rising: null }))}
              >
                {sorts.map(([value, title]) => (
                  <option key={value} value={value}>
                    {title}
                  </option>
                ))}
              </select>
            )}
          </Field>
          <button
            type="button"
            aria-label={rising === "yes" ? "Ascending: turn around" : "Descending: turn around"}
            onClick={() => go(changed({ rising: rising === "yes" ? "no" : "yes" }))}
          >
            {rising === "yes" ? "↑" : "↓"}
          </button>
        </Fold>
      </div>
      {exploration && <Progress now={exploration} />}
      {paged.error && !paged.rows.length ? (
        <Failure error={paged.error} again={paged.again} />
      ) : (
        <>
          {!paged.rows.length && (paged.loading ? <Loading /> : <NoneLeft />)}
          {collection && (
            <MissingPictures collection={collection} items={paged.rows.flatMap((center) => center.examples)} />
          )}
          <ul class="wall" aria-label="Clusters">
            {paged.rows.map((center) => (
              <Card key={center.id} center={center} collection={collection?.name} sort={sort} />
            ))}
          </ul>
          <More paged={paged} />
        </>
      )}
    </>
  );
}

function NoneLeft() {
  return (
    <Empty title="No cluster is like that">
      <p>
        <a href={changed({ query: null, min_size: null })}>Show all clusters</a>
      </p>
    </Empty>
  );
}

/** How many of the images that were labeled of late are unlike what was clustered. */
function Queries({ recent }: { recent: Recent }) {
  if (recent.novelty === null) return null;
  return (
    <span
      class={recent.novelty > UNUSUAL ? "novel" : ""}
      title="Share of the images labeled of late that lie farther from their center than 95 % of its members"
    >
      {` · ${percent(recent.novelty)} of ${counted(recent.images, "recent image")} novel`}
    </span>
  );
}

/** sort: what the wall is sorted by, which is then shown. */
export function Card({ center, collection, sort }: { center: Center; collection: string | undefined; sort: string }) {
  return (
    <li class="card">
      <a href={href(["clusters", center.id], { collection })}>
        {collection && <Mosaic collection={collection} items={center.examples} />}
        <h2>
          <bdi class={center.name === null ? "unnamed" : ""}>{clusterName(center)}</bdi>
        </h2>
        <p class="facts">
          {belongs(center) && <span>{belongs(center)}</span>}
          <span>{center.members === null ? `${count(center.size)} in training` : counted(center.members, "picture")}</span>
          {sort === "spread" && center.spread !== null && (
            <span title="Mean distance of the members to the center">spread {center.spread.toFixed(2)}</span>
          )}
          {sort === "novelty" && center.novelty !== null && (
            <span title="Share of members farther from the center than its training members were">
              {percent(center.novelty)} novel
            </span>
          )}
          {sort === "recent" && !!center.recent?.novelty && (
            <span title="Share of the images labeled of late that are farther from the center than 95 % of its members">
              {percent(center.recent.novelty)} of {counted(center.recent.images, "recent image")}
            </span>
          )}
        </p>
      </a>
    </li>
  );
}
